"""Damaged and forged frames, made from good ones: ``python -m tests.wire.hostile COUNT SEED``."""

import functools
import json
import resource
import struct
import sys
import zlib
from random import Random

import numpy as np

from aqg.core.grids import Grid
from aqg.core.messages import DenseUpload, Skip, Upload
from aqg.errors import WireError
from aqg.wire import Known, decode, encode
from aqg.wire.context import make_hints
from aqg.wire.frame import MIDTREAD_BIT, Mode
from aqg.wire.sections import encode_planes, split_floats, split_levels
from aqg.wire.varint import write_varint

from tests.wire.samples import FIELD_MODES, field_message, laplace_upload

Frame = tuple[bytes, int]
"""The bytes, and the length the receiver expects."""


@functools.cache
def good_frames():
    """Return small frames of every mode, section method, width and grid."""
    random = np.random.default_rng(0)
    messages = [Skip()]
    messages += [
        laplace_upload(grid, width, length, entropy_bits, seed=width)
        for grid in Grid
        for width in range(1, 17)
        for length in (3, 150, 700)
        for entropy_bits in (0.3, 0.6 * width, width)
    ]
    for length in (1, 200):
        messages.append(DenseUpload(random.normal(size=length).astype(np.float32)))
        messages.append(DenseUpload(np.zeros(length, np.float32)))
    frames = [
        (encode(message), 0 if isinstance(message, Skip) else len(message)) for message in messages
    ]
    # The context coder often wins: write the rANS sections of the same messages as well.
    for message in messages:
        if isinstance(message, Upload):
            hinted = encode(message, known=known_for(len(message)))
            if hinted[0] == 0x20 | Mode.HINTED:
                frames.append((hinted, len(message)))
            payload = encode_planes(split_levels(message), threads=1)
            body = encode(message)[1:4] + write_varint(len(message)) + payload
            frames.append((sealed(bytes([0x20 | Mode.CODED]) + body, len(message)), len(message)))
        elif isinstance(message, DenseUpload):
            payload = encode_planes(split_floats(message.dense), threads=1)
            body = bytes([0x20 | Mode.DENSE_CODED]) + write_varint(len(message)) + payload
            frames.append((sealed(body, len(message)), len(message)))
    for length in (1, 40, 700):
        for share in (0.02, 0.3):
            vector = np.repeat(random.standard_t(2, length), 7)[:length]
            field = [field_message(mode, vector, share) for mode in FIELD_MODES]
            frames += [(encode(message), length) for message in field]
    return frames


def known_for(length):
    """Return a reference for frames that need one; it makes hints of every class."""
    return Known(np.sin(np.arange(length, dtype=np.float32)) ** 5 / 8)


def sealed(body, length):
    """Append the checksum a forger would append."""
    checksum = zlib.crc32(body)
    if len(body) >= 4 and body[0] == 0x20 | Mode.HINTED:
        (step,) = struct.unpack("<f", b"\0\0" + body[2:4])
        hints = make_hints(known_for(length).reference, step if step > 0 else 0.0)
        checksum ^= zlib.crc32(hints)
    return body + struct.pack("<I", checksum)


def starved_frames(length):
    """Return short frames of every mode that claim ``length`` values, with checksums that fit.

    Their payloads end long before the values do, or are all that a vector of equal values needs.
    """
    frames = []
    for mode in Mode:
        for width in (2, 16):
            head = bytes([0x20 | mode])
            if mode < Mode.DENSE:
                head += bytes([width - 1 | MIDTREAD_BIT]) + b"\0\x3f"
            for starter in (b"", b"\x01\x02", b"\x80\x01\x06\x01\x02", b"\x3d\0\0\x01"):
                for filler in (b"", b"\0" * 6, b"\xff" * 6):
                    body = head + write_varint(length) + starter + filler
                    frames.append((sealed(body, length), length))
    return list(dict.fromkeys(frames))


def mutate(frame, frames, random):
    """Return a damaged frame, nine times in ten with a checksum that fits."""
    data, length = frame
    body = bytearray(data[:-4] if len(data) > 4 else data)
    for _ in range(random.randrange(1, 4)):
        damage(body, frames, random)
    if random.random() < 0.1:
        length = random.choice([0, 1, length + 1, max(0, length - 1), 2 * length, 1000])
    if random.random() < 0.1:
        return bytes(body), length
    return sealed(bytes(body), length), length


def damage(body, frames, random):
    """Damage some bytes in one of nine ways."""
    at = random.randrange(len(body) + 1)
    match random.randrange(9):
        case 0 if body:
            for _ in range(random.randrange(1, 9)):
                body[random.randrange(len(body))] ^= 1 << random.randrange(8)
        case 1:
            values = [0, 1, 127, 128, 255, random.randrange(256)]
            new = random.choices(values, k=random.randrange(1, 9))
            body[at : at + len(new)] = bytes(new)
        case 2:
            del body[at:]
        case 3:
            body[at:at] = random.randbytes(random.randrange(1, 9))
        case 4:
            del body[at : at + random.randrange(1, 9)]
        case 5:
            other = random.choice(frames)[0]
            body[at:] = other[random.randrange(len(other)) :]
        case 6:  # a huge varint where a length is, or may be
            at = random.choice([1, 4, 5, 6, 7, at])
            huge = write_varint(random.randrange(1 << 20, 1 << 62))
            body[at : at + random.randrange(0, 3)] = huge
        case 7 if len(body) > 4:  # the payload under another mode, width, grid or step
            head = [0x20 | random.choice(list(Mode)), random.randrange(32)]
            body[:4] = bytes(head) + random.randbytes(2)
        case 8:  # where section head, frequency table and coder states are
            for at in random.choices(range(4, 24), k=random.randrange(1, 5)):
                body[at : at + 1] = random.randbytes(1) if at < len(body) else b""


def accepts(data, length):
    """Tell whether a frame is read; it holds a valid message then, which can be sent again.

    Any exception but `WireError` passes through.
    """
    try:
        message = decode(data, length, known=known_for(length))
    except WireError:
        return False
    if not isinstance(message, Skip):
        message.validate()
        assert len(message) == length
        try:
            assert decode(encode(message), length) == message, data.hex()
        except WireError as error:
            raise AssertionError(f"what {data.hex()} holds does not survive the wire") from error
    return True


def attack(count, seed):
    """Read damaged frames; return how many were accepted."""
    random = Random(seed)
    frames = good_frames()
    return sum(accepts(*mutate(random.choice(frames), frames, random)) for _ in range(count))


def main():
    """Print how many `attack` found to be accepted and by how much memory has grown, as JSON."""
    attack(1000, 0)  # compiles, and takes what is taken once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted = attack(int(sys.argv[1]), int(sys.argv[2]))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"accepted": accepted, "grown_bytes": 1024 * grown}))


if __name__ == "__main__":
    main()
