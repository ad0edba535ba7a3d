"""Messages as bytes: bit packing, entropy coding and the versioned frame."""

from aqg.wire.frame import Known, decode, encode, encoded_size
from aqg.wire.warm import warm_up

__all__ = ["Known", "decode", "encode", "encoded_size", "warm_up"]
