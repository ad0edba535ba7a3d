"""Integers in as many bytes as they need, seven bits to a byte, lowest first."""

import numpy as np
from numpy.typing import NDArray

from aqg.errors import WireError

MAX_BYTES = 9
"""Enough for every integer below 2^63."""


def write_varint(value: int) -> bytes:
    """Encode ``value``; the high bit of a byte says that more follow.

    >>> write_varint(0).hex(), write_varint(127).hex(), write_varint(7850).hex()
    ('00', '7f', 'aa3d')
    """
    if not 0 <= value < 1 << (7 * MAX_BYTES):
        raise WireError(f"{value} is outside 0..2^{7 * MAX_BYTES} - 1, the range of a varint")
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def varint_size(value: int) -> int:
    """Return the number of bytes `write_varint` needs.

    >>> varint_size(127), varint_size(128)
    (1, 2)
    """
    return max(1, (value.bit_length() + 6) // 7)


def read_varint(data: bytes | NDArray[np.uint8], position: int) -> tuple[int, int]:
    """Decode the integer at ``position``; return it and the position after it.

    Only the shortest form is accepted, so that one integer has one encoding.

    >>> read_varint(bytes.fromhex("aa3d"), 0)
    (7850, 2)
    """
    value = 0
    for index in range(MAX_BYTES):
        if position + index >= len(data):
            raise WireError(f"the frame ends inside the varint at byte {position}")
        byte = int(data[position + index])
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if byte == 0 and index > 0:
                raise WireError(f"the varint at byte {position} is not in its shortest form")
            return value, position + index + 1
    raise WireError(f"the varint at byte {position} is longer than {MAX_BYTES} bytes")


def read_part(
    data: NDArray[np.uint8], position: int, what: str
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return so many bytes as the varint at ``position`` says, and all that follow them."""
    size, start = read_varint(data, position)
    if size > len(data) - start:
        raise WireError(f"{what} {size} bytes where {len(data) - start} are left")
    return data[start : start + size], data[start + size :]


def write_zigzag(number: int) -> bytes:
    """Encode an integer with a sign: 0, -1, 1, -2 and so on as 0, 1, 2, 3."""
    return write_varint(2 * number if number >= 0 else -2 * number - 1)


def read_zigzag(data: bytes | NDArray[np.uint8], position: int) -> tuple[int, int]:
    """Undo `write_zigzag`; return the integer and the position after it."""
    code, position = read_varint(data, position)
    return code >> 1 if code % 2 == 0 else -(code >> 1) - 1, position
