"""Messages as bytes: bit packing, entropy coding and the versioned frame."""

from aqg.wire.frame import decode, encode, encoded_size

__all__ = ["decode", "encode", "encoded_size"]
