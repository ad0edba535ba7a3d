"""A world in simulated time in which everything goes wrong: the protocol's tester.

One server and a few clients exchange orders and replies over a network that loses, delays and
doubles them. Clients crash, are wiped, and get old copies of their memory back; the server crashes
and comes back from a checkpoint; replies are tampered with and replayed. What must hold all the
same is checked at every event.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.optimizers import SGD
from aqg.core.recipe import Recipe
from aqg.flower.messages import Order, Reply
from aqg.flower.protocol import (
    Base,
    ClientMirror,
    MirrorBook,
    answer,
    find_base,
    fingerprint,
    stale_reply,
)

if TYPE_CHECKING:
    from aqg.core.types import FloatArray

FindBase = Callable[[Recipe, ClientMirror, Order, int], Base | None]

ROUND_SECONDS = 10.0
NUM_PARAMS = 6
STEP_SIZE = 0.05
SEED = 3


@dataclass
class Rates:
    """How likely each kind of trouble is, per occasion."""

    lose: float = 0.12
    delay: float = 0.15
    double: float = 0.1
    crash_before_saving: float = 0.05
    crash_before_replying: float = 0.08
    copy: float = 0.3
    restore: float = 0.15
    wipe: float = 0.05
    tamper: float = 0.1
    server_crash: float = 0.1


CALM = Rates(*([0.0] * 10))


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two states are made of the very same objects."""
    return all(
        a is b or (isinstance(a, tuple) and same(a, b)) or (isinstance(a, int) and a == b)
        for a, b in zip(one, other, strict=True)
    )


class World:
    """Plays one schedule; raises AssertionError when something that must hold does not."""

    def __init__(
        self,
        seed: int,
        recipe: Recipe,
        num_clients: int = 2,
        find: FindBase = find_base,
        book_type: type[MirrorBook] = MirrorBook,
        rates: Rates | None = None,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.recipe, self.find = recipe, find
        self.rates = rates if rates is not None else Rates()
        weights = 0.5 + self.rng.random(num_clients)
        first = MirrorBook.first(recipe, np.zeros(NUM_PARAMS), weights, SGD())
        self.book = book_type(recipe, first.state, first.entries, weights)
        self.book_type = book_type
        self.saved = self.book.state, self.book.entries
        self.incarnation = 1
        self.disks = [ClientMirror.first(recipe, NUM_PARAMS, "float64") for _ in range(num_clients)]
        self.copies: list[list[ClientMirror]] = [[disk] for disk in self.disks]
        self.old_replies: list[list[Reply]] = [[] for _ in range(num_clients)]
        self.targets = self.rng.standard_normal((num_clients, NUM_PARAMS))
        self.pending: dict[int, tuple[int, int]] = {}
        self.arrived: dict[int, tuple[Reply, FloatArray, bool]] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now = 0.0
        self.serials = count()
        self.num_additions, self.largest = 1, 1.0
        self.seen: Counter[str] = Counter()

    # The network.

    def happens(self, rate: float) -> bool:
        return bool(self.rng.random() < rate)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.serials), action))

    def carry(self, action: Callable[[], None]) -> None:
        """Deliver something: never, now, much later, or twice."""
        if self.happens(self.rates.lose):
            self.seen["lost"] += 1
            return
        for _ in range(2 if self.happens(self.rates.double) else 1):
            slow = self.happens(self.rates.delay)
            self.seen["delayed"] += slow
            self.later(self.rng.uniform(8, 35) if slow else self.rng.uniform(0.1, 4), action)

    # The server.

    def run(self, num_rounds: int) -> None:
        """Run rounds with trouble, then two calm ones after which all must agree again."""
        for _ in range(num_rounds):
            self.round()
        self.rates = CALM
        self.events.clear()
        for _ in range(2):
            self.round()
            self.check_agreement()

    def round(self) -> None:
        self.pending, self.arrived = {}, {}
        state = self.book.state
        for client in range(len(self.disks)):
            self.give_order(client)
        end = self.now + ROUND_SECONDS
        crash = self.now + self.rng.uniform(0, 12) if self.happens(self.rates.server_crash) else 1e9
        while self.events and self.events[0][0] <= min(end, crash):
            self.now, _, action = heapq.heappop(self.events)
            action()
        if crash <= end:
            self.now = crash
            self.crash_server()
            return
        self.now = end
        self.take_in()
        assert self.book.state.round == state.round
        self.book.step(STEP_SIZE, 0.0, 1.0, SGD())
        self.saved = self.book.state, self.book.entries
        for client in range(len(self.disks)):
            self.trouble_disk(client)

    def crash_server(self) -> None:
        self.seen["server crash"] += 1
        if self.happens(0.5):
            self.take_in()  # crashed after the replies were taken, before the checkpoint
        self.pending = {}
        self.incarnation += 1
        self.book = self.book_type(self.recipe, *self.saved, self.book.weights)

    def give_order(self, client: int) -> None:
        stamp, state = self.book.entries[client].stamp, self.book.state
        order = Order(
            run="r",
            fingerprint=fingerprint(self.recipe, NUM_PARAMS, "float64", SEED),
            recipe="",
            bits=4,
            max_staleness=100,
            seed=SEED,
            num_params=NUM_PARAMS,
            dtype="float64",
            incarnation=self.incarnation,
            round=state.round,
            client=client,
            movement=self.recipe.movement.of(state.model.history),
            epoch=stamp.epoch,
            uploads=stamp.uploads,
            digest=stamp.digest,
            evaluate=False,
        )
        identifier = next(self.serials)
        self.pending[identifier] = (client, state.round)
        params, mirror = state.parameters.copy(), state.mirror(client).copy()
        self.carry(lambda: self.obey(identifier, client, order, params, mirror))

    def hear(self, identifier: int, client: int, reply: Reply, mirror: FloatArray) -> None:
        if self.pending.get(identifier) != (client, self.book.state.round):
            self.seen["late"] += 1
            return
        del self.pending[identifier]
        bad = None
        if self.happens(self.rates.tamper):
            bad = self.tamper(client, reply)
            self.seen["tampered"] += bad is not None
        self.arrived[client] = (reply if bad is None else bad, mirror, bad is not None)
        self.old_replies[client].append(reply)

    def tamper(self, client: int, reply: Reply) -> Reply | None:
        """Return a reply that must not be taken; None where there is no such thing to do."""
        old = [r for r in self.old_replies[client] if r.round != reply.round]
        match int(self.rng.integers(5)):
            case 0 if old:
                return old[int(self.rng.integers(len(old)))]
            case 1 if old:
                stolen = old[int(self.rng.integers(len(old)))]
                forged = replace(stolen, incarnation=reply.incarnation, round=reply.round)
                # A client that lies about its own past may continue it in any way that fits.
                held = self.book.entries[client].stamp
                fits = forged.base == held or (forged.restarted and forged.epoch > held.epoch)
                return None if fits or forged.stale else forged
            case 2 if len(reply.frame) > 1:
                damaged = bytearray(reply.frame)
                damaged[int(self.rng.integers(len(damaged)))] ^= 1 << int(self.rng.integers(8))
                return replace(reply, frame=bytes(damaged))
            case 3 if not reply.stale:
                return replace(reply, digest=bytes(16))
            case 4 if not reply.stale:
                return replace(reply, uploads=reply.uploads + 1)
        return None

    def take_in(self) -> None:
        for client, (reply, mirror, is_bad) in sorted(self.arrived.items()):
            before = self.book.state
            entries = self.book.entries
            if reply.stale and not is_bad:
                self.seen["stale"] += 1
                continue
            verdict = self.book.accept(client, reply, self.incarnation)
            if verdict.message is None:
                assert same(self.book.state, before), "a reply that was not taken changed something"
                assert self.book.entries == entries
                self.seen["rejected"] += 1
            else:
                assert not is_bad, "a tampered reply was taken"
                assert np.array_equal(self.book.state.mirror(client), mirror), (
                    "the mirror is not the one of the client whose reply was taken"
                )
                self.seen["restarted"] += reply.restarted
                self.seen["rolled back"] += reply.rolled_back
                self.seen["taken"] += 1
            self.check_sum()

    # The clients.

    def obey(
        self, identifier: int, client: int, order: Order, params: FloatArray, mirror: FloatArray
    ) -> None:
        base = self.find(self.recipe, self.disks[client], order, int(self.rng.integers(1000)))
        if base is None:
            reply = stale_reply(order)
            self.carry(lambda: self.hear(identifier, client, reply, mirror))
            return
        held = base.snapshot.state.link.mirror[0]
        assert base.restarted or np.array_equal(held, mirror), (
            "a mirror that differs from the server's was not noticed at contact"
        )
        noise = np.random.default_rng([order.round, client]).standard_normal(NUM_PARAMS)
        gradient = params - self.targets[client] + 0.3 * noise
        memory, reply = answer(self.recipe, base, order, gradient)
        if self.happens(self.rates.crash_before_saving):
            self.seen["crash"] += 1
            return
        self.disks[client] = memory
        if self.happens(self.rates.copy):
            self.copies[client].append(memory)
        if self.happens(self.rates.crash_before_replying):
            self.seen["crash"] += 1
            return
        after = memory.current.state.link.mirror[0]
        self.carry(lambda: self.hear(identifier, client, reply, after))

    def trouble_disk(self, client: int) -> None:
        if self.happens(self.rates.restore):
            copies = self.copies[client]
            recent = copies[-3:]
            self.disks[client] = recent[int(self.rng.integers(len(recent)))]
            self.seen["restored"] += 1
        if self.happens(self.rates.wipe):
            self.disks[client] = ClientMirror.first(self.recipe, NUM_PARAMS, "float64")
            self.seen["wiped"] += 1

    # What must hold.

    def check_sum(self) -> None:
        """The running sum is the sum of the mirrors, but for the rounding of each addition."""
        if not self.recipe.memory.keeps_mirror:
            return
        state = self.book.state
        weighted = self.book.weights[:, np.newaxis] * np.concatenate(
            [peer.link.mirror for peer in state.peers]
        )
        self.num_additions += 2
        self.largest = max(self.largest, np.abs(weighted).sum(), np.abs(state.model.total).max())
        allowed = 4 * np.finfo(np.float64).eps * self.num_additions * self.largest
        error = np.abs(state.model.total - weighted.sum(axis=0)).max()
        assert error <= allowed, "the sum is not the sum of the mirrors"

    def check_agreement(self) -> None:
        for client, disk in enumerate(self.disks):
            assert disk.current.stamp == self.book.entries[client].stamp, "no agreement"
            assert np.array_equal(disk.current.state.link.mirror[0], self.book.state.mirror(client))
