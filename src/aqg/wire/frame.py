"""One message, one frame: ``encode`` and ``decode``.

``docs/reference/frame-format.md`` describes each byte.
"""

import struct
import zlib
from typing import NamedTuple

import numpy as np

from aqg.core.grids import Grid, is_valid_step, level_dtype, num_levels
from aqg.core.messages import DenseUpload, Message, Skip, Upload
from aqg.core.track import Track
from aqg.core.types import ByteArray, FloatArray, Int8Array, Levels, is_whole
from aqg.errors import MessageError, WireError
from aqg.wire import context, payloads, sections
from aqg.wire.bitpack import pack, packed_size, unpack
from aqg.wire.payloads import Mode
from aqg.wire.varint import CRC_BYTES, Reader, write_varint

VERSION = 1
UPLOAD_HEAD_BYTES = 4
MIDTREAD_BIT = 0x10


class Known(NamedTuple):
    """What both ends hold before an upload, to the same bits; it lets them write less."""

    reference: FloatArray  # ``ref_m``, to which the upload will be added
    # `aqg.core.track.direction_of` the client's last upload, where it is kept
    direction: Int8Array | None = None


def known(track: Track) -> Known | None:
    """Return what both ends hold of a client before a message; None where there is no mirror."""
    if not track.position.shape[1]:
        return None
    return Known(track.position[0], track.direction[0])


def encode(message: Message, *, known: Known | None = None, threads: int | None = None) -> bytes:
    """Write ``message`` as one frame, in the mode that makes it shortest.

    A frame written with ``known`` may need it to be read: `decode` notices if it gets another.
    Large messages are coded in blocks on up to ``threads`` threads (``None``: one per core); the
    bytes do not depend on it.

    >>> from aqg.core.grids import Grid
    >>> upload = Upload(np.array([0, 1, 2], np.uint8), step=0.5, width=2, grid=Grid.MIDTREAD)
    >>> encode(upload).hex()
    '2111003f0324bddcab18'
    >>> encode(Skip()).hex()
    '20'
    """
    if not isinstance(message, Message):
        raise MessageError(f"a {type(message).__name__} is no message; there is no frame for it")
    if isinstance(message, Skip):
        return bytes([_first_byte(Mode.SKIP)])
    message.validate()
    hints = None
    if isinstance(message, Upload):
        hints = _hints(known, message.step, len(message))
        mode, payload = encode_levels(message, hints, threads)
        head = _upload_head(mode, message)
    else:
        mode, payload = payloads.encode_values(message, threads)
        head = bytes([_first_byte(mode)])
    body = b"".join([head, write_varint(len(message)), payload])
    checksum = zlib.crc32(body) ^ (_hints_checksum(hints) if mode is Mode.HINTED else 0)
    return body + struct.pack("<I", checksum)


def decode(
    data: bytes | bytearray | memoryview,
    expected_length: int,
    *,
    known: Known | None = None,
    threads: int | None = None,
) -> Message:
    """Read one frame of a message for ``expected_length`` parameters.

    Raises `WireError`, and nothing else, on bytes that are no frame of that length. Memory is taken
    in proportion to ``expected_length`` and ``len(data)`` only.

    >>> decode(bytes.fromhex("2111003f0324bddcab18"), 3).values(np.float32)
    array([-0.5,  0. ,  0.5], dtype=float32)
    """
    if not is_whole(expected_length):
        raise WireError(f"expected_length is {expected_length!r}; it must be a whole number")
    if expected_length < 0:
        raise WireError(f"expected_length is {expected_length}; it must not be negative")
    frame = _as_bytes(data)
    mode, difference = _check_envelope(frame)
    if mode is Mode.SKIP:
        return Skip()
    body = frame[: len(frame) - CRC_BYTES]
    head_bytes = 1 if mode >= Mode.DENSE else UPLOAD_HEAD_BYTES
    if len(body) < head_bytes:
        raise WireError(f"the head of the frame has {len(body)} bytes; it needs {head_bytes}")
    reader = Reader(body)
    head, hints = reader.take(head_bytes, "its head"), None
    try:
        if mode is Mode.HINTED:
            if known is None:
                raise WireError("it was written with what both ends know, which is not given here")
            hints = _hints(known, _read_step(head), expected_length)
            if _hints_checksum(hints) != difference:
                raise WireError("the frame is damaged, or was written with another reference")
        length = reader.varint()
        if length != expected_length:
            raise WireError(f"the frame holds {length} values where {expected_length} are expected")
        if mode < Mode.DENSE:
            return _read_upload(mode, head, reader.rest(), hints, length, threads)
        message = payloads.decode_values(mode, reader.rest(), length, threads)
        message.validate()
        return message
    except MessageError as error:
        raise WireError(f"the frame holds no valid message: {error}") from error


def _as_bytes(data: bytes | bytearray | memoryview) -> ByteArray:
    try:
        frame = np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise WireError(f"a frame is contiguous bytes, not {type(data).__name__}") from error
    if len(frame) == 0:
        raise WireError("the frame is empty; it has at least 1 byte")
    frame.flags.writeable = False
    return frame


def _check_envelope(frame: ByteArray) -> tuple[Mode, int]:
    """Check checksum, version and mode: what every version of the format keeps in its place.

    Return the mode and, where hints are part of the checksum, what theirs must be.
    """
    first = int(frame[0])
    is_short = len(frame) == 1
    difference = 0
    if not is_short:
        stored = int.from_bytes(frame[-CRC_BYTES:].tobytes(), "little")
        computed = zlib.crc32(frame[: max(0, len(frame) - CRC_BYTES)].data)
        difference = stored ^ computed
        if difference and first != _first_byte(Mode.HINTED):
            raise WireError(f"the checksum is {computed:08x} where the frame says {stored:08x}")
    version = first >> 5
    if version != VERSION:
        raise WireError(f"the frame has version {version}; this decoder reads version {VERSION}")
    try:
        mode = Mode(first & 0x1F)
    except ValueError:
        raise WireError(f"mode {first & 0x1F} is unknown in version {VERSION}") from None
    if is_short != (mode is Mode.SKIP):
        raise WireError(f"a frame of mode {mode.name} cannot have {len(frame)} bytes")
    return mode, difference


def _hints(known: Known | None, step: float, length: int) -> Int8Array | None:
    if known is None:
        return None
    if len(known.reference) != length:
        raise MessageError(
            f"the known reference has {len(known.reference)} values, the upload {length}"
        )
    hints = context.make_hints(known.reference, step, known.direction)
    return hints if np.count_nonzero(hints) else None  # before the first upload nothing is known


def _hints_checksum(hints: Int8Array | None) -> int:
    return 0 if hints is None else zlib.crc32(np.ascontiguousarray(hints).data)


def encode_levels(
    upload: Upload, hints: Int8Array | None, threads: int | None
) -> tuple[Mode, bytes]:
    """Return the shortest payload and its mode; the simpler mode where two are equally short."""
    places = payloads.few_places(upload)
    if places is not None and len(places) < payloads.LEARNING_COUNT:
        return Mode.GAPS, payloads.encode_gaps(upload, places)
    best, mode = sections.encode_planes(sections.split_levels(upload), threads), Mode.CODED
    if len(upload) <= context.LONGEST:
        bound = num_levels(upload.grid, upload.width)
        coded = context.encode(upload.levels, bound, hints=hints)
        if len(coded) < len(best):
            best, mode = coded, Mode.CONTEXT if hints is None else Mode.HINTED
    if packed_size(len(upload), upload.width) <= len(best):
        best, mode = pack(upload.levels, upload.width).tobytes(), Mode.RAW
    if places is not None and len(few := payloads.encode_gaps(upload, places)) < len(best):
        best, mode = few, Mode.GAPS
    return mode, best


def encode_bare(upload: Upload) -> bytes:
    """Write levels alone: their reader knows how many, and checks what they are part of."""
    upload.validate()
    mode, payload = encode_levels(upload, None, None)
    return bytes([mode]) + _upload_head(mode, upload)[1:] + payload


def decode_bare(data: ByteArray, length: int) -> Upload:
    if len(data) < UPLOAD_HEAD_BYTES:
        raise WireError(f"a quantized vector has at least 4 bytes, not {len(data)}")
    number = int(data[0])
    if number not in (Mode.RAW, Mode.CODED, Mode.CONTEXT, Mode.GAPS):
        raise WireError(f"mode {number} does not hold levels that need no context")
    try:
        return _read_upload(Mode(number), data, data[UPLOAD_HEAD_BYTES:], None, length, None)
    except MessageError as error:
        raise WireError(f"no valid message: {error}") from error


def _read_upload(
    mode: Mode,
    head: ByteArray,
    payload: ByteArray,
    hints: Int8Array | None,
    length: int,
    threads: int | None,
) -> Upload:
    shape = int(head[1])
    if shape & 0xE0:
        raise WireError(f"the unused bits of byte 1 are {shape >> 5}; they must be zero")
    width = (shape & 0x0F) + 1
    grid = Grid.MIDTREAD if shape & MIDTREAD_BIT else Grid.MIDRISE
    step = _read_step(head)
    levels = decode_levels(mode, payload, width, grid, length, threads, hints)
    upload = Upload(levels, step, width, grid)
    upload.validate()
    return upload


def decode_levels(
    mode: Mode,
    payload: ByteArray,
    width: int,
    grid: Grid,
    length: int,
    threads: int | None,
    hints: Int8Array | None = None,
) -> Levels:
    """Undo `encode_levels`; levels may be beyond the grid."""
    if mode is Mode.RAW:
        return unpack(payload, width, length)
    if mode is Mode.CODED:
        planes = sections.decode_planes(
            payload, sections.level_alphabets(grid, width), length, threads
        )
        return sections.join_levels(planes, width)
    if mode is Mode.GAPS:
        if width != payloads.WIDTH or grid is not Grid.MIDTREAD:
            raise WireError(f"mode GAPS holds levels of midtread at 2 bits, not {grid} at {width}")
        return payloads.decode_gaps(payload, length)
    return context.decode(payload, length, num_levels(grid, width), hints=hints)


def _first_byte(mode: Mode) -> int:
    return VERSION << 5 | mode


def _upload_head(mode: Mode, upload: Upload) -> bytes:
    shape = upload.width - 1
    shape |= MIDTREAD_BIT if upload.grid is Grid.MIDTREAD else 0
    # A bfloat16 number is the upper half of the float32 of the same value; `+ 0.0` drops the sign
    # of a negative zero.
    (step,) = struct.unpack("<I", struct.pack("<f", upload.step + 0.0))
    return struct.pack("<BBH", _first_byte(mode), shape, step >> 16)


def _read_step(head: ByteArray) -> float:
    step: float = struct.unpack("<f", b"\0\0" + head[2:4].tobytes())[0]
    if not is_valid_step(step) or head[3] >> 7:
        raise WireError(f"step {step!r} is not a bfloat16 number in range")
    return step


def warm_up() -> None:
    """Run every kernel once on tiny messages; the first time on a machine this compiles them."""
    random = np.random.default_rng(0)
    few = np.ones(100, np.uint8)
    few[7] = 2
    messages: list[Upload | DenseUpload] = [DenseUpload(np.ones(2000, np.float32))]
    messages.append(Upload(few, 1.0, 2, Grid.MIDTREAD))
    for width in (4, 12):
        bound = num_levels(Grid.MIDTREAD, width)
        peaked, flat = np.minimum(random.geometric(0.7, 300), bound) - 1, random.permutation(bound)
        for numbers in (peaked, flat[:100]):
            levels: Levels = numbers.astype(level_dtype(width))
            messages.append(Upload(levels, 1.0, width, Grid.MIDTREAD))
    for message in messages:
        decode(encode(message), len(message))
    upload, direction = Upload(few + np.uint8(6), 1.0, 4, Grid.MIDTREAD), np.ones(100, np.int8)
    for reference in (np.ones(100, np.float32), np.ones(100)):
        for known in (Known(reference, direction), Known(reference)):
            decode(encode(upload, known=known), len(upload), known=known)
