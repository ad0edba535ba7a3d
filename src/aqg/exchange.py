"""A client and a server in lockstep, with frames between them, for loops in one process.

Every frame must arrive, once and in order. One that is lost leaves both ends with different
mirrors, which is noticed only if a later frame leans on them: those of recipes without mirrors and
of small models mostly do not. Between machines use `aqg.ServerSession` and `aqg.ClientSession`,
which find out and mend it.
"""

import math

from aqg.core.messages import Broadcast
from aqg.core.recipe import Recipe
from aqg.core.round import ClientState, init_client, respond
from aqg.core.server import (
    ServerState,
    broadcast,
    check_client,
    finish_round,
    init_server,
    take_message,
)
from aqg.core.types import FloatArray
from aqg.errors import MessageError
from aqg.wire import decode, encode, known

__all__ = ["broadcast", "client_step", "finish_round", "init_client", "init_server", "receive"]


def client_step(
    recipe: Recipe,
    state: ClientState,
    gradient: FloatArray,
    news: Broadcast,
    *,
    client: int = 0,
    seed: int = 0,
    loss: float = math.nan,
) -> tuple[ClientState, bytes]:
    """Take one client's part in a round: return its state after it, and the frame to send.

    Args:
        recipe: the compressor, the same as the server's.
        state: the client's state before the round.
        gradient: ``g_m^k`` at ``news.parameters``, or another update, flat, in the precision of
            the state. It is left as it is. One with NaN or infinity is not sent; the frame is then
            that of a client with nothing to say.
        news: what the server broadcast.
        client: the client's number, and
        seed: a number of the run's: together they make the randomness of recipes that draw.
        loss: the client's loss, which some recipes follow.

    """
    if not isinstance(news, Broadcast):
        raise MessageError(f"news is a {type(news).__name__}; it must be what broadcast returned")
    shared = known(state.track)
    key = (seed, client, news.round)
    state, message = respond(recipe, state, gradient, news.movement, key, loss, noise=news.noise)
    return state, encode(message, known=shared)


def receive(
    recipe: Recipe, state: ServerState, client: int, frame: bytes, weight: float = 1.0
) -> ServerState:
    """Take in one client's frame and return the server's state after it.

    The whole frame is checked first. One that is damaged, or can be seen to lean on another mirror
    than the server's, raises `WireError`; one that makes no sense now, such as a second one in the
    same round, `MessageError`. The state given is left as it was.

    With a ``weight`` other than 1, the same in every round, the sum is ``Σ_m weight_m·ref_m``.
    """
    check_client(state, client)
    shared = known(state.peers[client].track)
    message = decode(frame, len(state.parameters), known=shared)
    return take_message(recipe, state, client, message, weight)
