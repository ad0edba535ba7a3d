"""Frames from front to back: integers in as many bytes as they need, parts, and the checksum."""

import struct
import zlib
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import ByteArray
from aqg.errors import WireError

MAX_BYTES = 9
"""Enough for every integer below 2^63."""


def write_varint(value: int) -> bytes:
    """Encode ``value``, seven bits to a byte, lowest first; the high bit says that more follow."""
    if not 0 <= value < 1 << (7 * MAX_BYTES):
        raise WireError(f"{value} is outside 0..2^{7 * MAX_BYTES} - 1, the range of a varint")
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def write_zigzag(number: int) -> bytes:
    """Encode an integer with a sign: 0, -1, 1, -2 and so on as 0, 1, 2, 3."""
    return write_varint(2 * number if number >= 0 else -2 * number - 1)


def write_part(payload: bytes) -> bytes:
    return write_varint(len(payload)) + payload


CRC_BYTES = 4


def seal(body: bytes, known: bytes = b"") -> bytes:
    """Return a body with its CRC-32 behind it, which may begin with what the reader knows."""
    return body + struct.pack("<I", zlib.crc32(body, zlib.crc32(known)))


class Reader:
    """Reads a frame from front to back; `WireError` where it ends before what is asked for."""

    def __init__(self, data: bytes | ByteArray, what: str = "the frame") -> None:
        self._data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        self._position = 0
        self._what = what

    @classmethod
    def of_sealed(cls, data: bytes, what: str, least: int) -> Self:
        """Read what `seal` returned for a body of at least so many bytes."""
        if len(data) < least + CRC_BYTES:
            raise WireError(f"{what} has at least {least + CRC_BYTES} bytes, not {len(data)}")
        body = data[:-CRC_BYTES]
        if zlib.crc32(body) != int.from_bytes(data[-CRC_BYTES:], "little"):
            raise WireError(f"the checksum of {what} is wrong: it is damaged")
        return cls(body, what)

    @property
    def left(self) -> int:
        return len(self._data) - self._position

    def take(self, size: int, what: str) -> ByteArray:
        if size > self.left:
            raise WireError(f"{self._what} ends at byte {len(self._data)}, inside {what}")
        self._position += size
        return self._data[self._position - size : self._position]

    def byte(self, what: str) -> int:
        return int(self.take(1, what)[0])

    def array(self, count: int, kind: str, what: str) -> NDArray[Any]:
        """Return a copy of so many numbers of a NumPy type."""
        return np.frombuffer(self.take(count * np.dtype(kind).itemsize, what).tobytes(), kind)

    def varint(self) -> int:
        """Read an integer in its shortest form: no other is accepted, so each has one encoding."""
        start, value = self._position, 0
        for index in range(MAX_BYTES):
            if not self.left:
                raise WireError(f"the frame ends inside the varint at byte {start}")
            byte = int(self._data[self._position])
            self._position += 1
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                if byte == 0 and index > 0:
                    raise WireError(f"the varint at byte {start} is not in its shortest form")
                return value
        raise WireError(f"the varint at byte {start} is longer than {MAX_BYTES} bytes")

    def zigzag(self) -> int:
        code = self.varint()
        return code >> 1 if code % 2 == 0 else -(code >> 1) - 1

    def part(self, what: str) -> ByteArray:
        size = self.varint()
        if size > self.left:
            raise WireError(f"{what} claims {size} bytes where {self.left} are left")
        return self.take(size, what)

    def rest(self) -> ByteArray:
        return self.take(self.left, "it")

    def finish(self, last: str) -> None:
        """Refuse bytes that nobody has asked for."""
        if self.left:
            raise WireError(f"{self.left} bytes follow {last}")
