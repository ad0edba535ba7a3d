"""Federated learning that uploads only what the server does not know yet.

`ServerSession` and `ClientSession` are federated learning over any transport, and take numpy and
numba alone; the simulator and its problem are in `aqg.sim`, which comes with ``aqg[sim]``. Nothing
else is promised to stay.
"""

from aqg.core.messages import (
    BlockUpload,
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
from aqg.protocol.client import ClientSession
from aqg.protocol.server import Receipt, ServerSession
from aqg.weights import load_model
from aqg.wire import decode, encode

__version__ = "0.2.0"

# fmt: off
__all__ = [
    "SGD", "Adam", "AqgError", "BlockUpload", "ClientSession", "ConfigError", "DataError",
    "DenseUpload", "GradientError", "HalfUpload", "MessageError", "Momentum", "Receipt", "Recipe",
    "RotatedUpload", "RunError", "ServerSession", "Skip", "SparseUpload", "Upload", "WireError",
    "__version__", "decode", "encode", "load_model", "make_recipe", "register",
]
# fmt: on
