"""Messages as bytes: bit packing, entropy coding and the versioned frame."""

from aqg.wire.frame import Known, decode, encode, known, warm_up

__all__ = ["Known", "decode", "encode", "known", "warm_up"]
