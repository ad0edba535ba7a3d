"""Federated learning that uploads only what the server does not know yet.

What a client and a server need is here, and takes numpy and numba alone; the simulator and its
problem are in `aqg.sim`, which comes with ``aqg[sim]``. Nothing else is promised to stay.
"""

from aqg.core.client import ClientState, init_client
from aqg.core.hearing import ServerState, broadcast, finish_round, init_server
from aqg.core.messages import (
    BlockUpload,
    Broadcast,
    DenseUpload,
    HalfUpload,
    RotatedUpload,
    Skip,
    SparseUpload,
    Upload,
)
from aqg.core.optimizers import SGD, Adam, Momentum
from aqg.core.recipe import Recipe
from aqg.core.recipes import make_recipe, register
from aqg.errors import (
    AqgError,
    ConfigError,
    DataError,
    GradientError,
    MessageError,
    RunError,
    WireError,
)
from aqg.exchange import client_step, receive
from aqg.weights import load_model
from aqg.wire import decode, encode

__version__ = "0.2.0"

__all__ = [
    "SGD",
    "Adam",
    "AqgError",
    "BlockUpload",
    "Broadcast",
    "ClientState",
    "ConfigError",
    "DataError",
    "DenseUpload",
    "GradientError",
    "HalfUpload",
    "MessageError",
    "Momentum",
    "Recipe",
    "RotatedUpload",
    "RunError",
    "ServerState",
    "Skip",
    "SparseUpload",
    "Upload",
    "WireError",
    "__version__",
    "broadcast",
    "client_step",
    "decode",
    "encode",
    "finish_round",
    "init_client",
    "init_server",
    "load_model",
    "make_recipe",
    "receive",
    "register",
]
