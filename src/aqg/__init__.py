"""Federated learning that uploads only what the server does not know yet.

The algorithm and the wire format need numpy and numba alone and are imported here; the simulator
(`aqg.sim`), data (`aqg.data`) and experiments (`aqg.experiments`) come with ``aqg[sim]``.
"""

from aqg.core.client import ClientState, client_step, init_client
from aqg.core.grids import Grid
from aqg.core.innovation import Innovation, measure
from aqg.core.messages import Broadcast, DenseUpload, Message, Skip, Upload
from aqg.core.mirror import Memory
from aqg.core.movement import Movement
from aqg.core.policies import (
    Always,
    Decision,
    Lazy,
    LazyExact,
    Multilevel,
    Policy,
    Tolerance,
    TwoLevel,
)
from aqg.core.quantizers import GridQuantizer, Quantizer, Sign, Stochastic, Verbatim
from aqg.core.recipe import Recipe
from aqg.core.recipes import RECIPES, make_recipe, register
from aqg.core.server import ServerState, broadcast, finish_round, init_server, receive
from aqg.errors import (
    AqgError,
    ConfigError,
    DataError,
    GradientError,
    MessageError,
    RunError,
    WireError,
)
from aqg.weights import load_model
from aqg.wire import decode, encode, encoded_size

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "Always",
    "AqgError",
    "Broadcast",
    "ClientState",
    "ConfigError",
    "DataError",
    "Decision",
    "DenseUpload",
    "GradientError",
    "Grid",
    "GridQuantizer",
    "Innovation",
    "Lazy",
    "LazyExact",
    "Memory",
    "Message",
    "MessageError",
    "Movement",
    "Multilevel",
    "Policy",
    "Quantizer",
    "Recipe",
    "RunError",
    "ServerState",
    "Sign",
    "Skip",
    "Stochastic",
    "Tolerance",
    "TwoLevel",
    "Upload",
    "Verbatim",
    "WireError",
    "__version__",
    "broadcast",
    "client_step",
    "decode",
    "encode",
    "encoded_size",
    "finish_round",
    "init_client",
    "init_server",
    "load_model",
    "make_recipe",
    "measure",
    "receive",
    "register",
]
