"""Hostile frames: only `WireError` or a valid message, in bounded memory, never a crash."""

import contextlib
import json
import os
import sys
import time
import tracemalloc
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

from aqg.core.downlink import Entry, advance
from aqg.errors import MessageError, WireError
from aqg.protocol.messages import Order, Reply, Stamp
from aqg.wire import context, decode
from aqg.wire.entry import Merger, encode_entry, encode_log, encode_snapshot
from aqg.wire.frame import Mode
from aqg.wire.statistics import (
    PRECISIONS,
    Section,
    StatisticsMessage,
    decode_statistics,
    encode_statistics,
)
from aqg.wire.varint import seal, write_varint

from tests.commands import run
from tests.problems import soak
from tests.wire.hostile import (
    accepts,
    attack,
    damage,
    good_frames,
    known_for,
    mutate,
    sealed,
    starved_frames,
)
from tests.wire.logs import MOVEMENT, accepts_log, entries, of_position, start

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("count", "seed"), [(20_000, 1), soak(50_000, 2)])
def test_damaged_frames(count, seed):
    # Some damage makes another valid message; if none or all did, the test would test nothing.
    assert count / 100 < attack(count, seed) < count / 5


@pytest.mark.soak
def test_with_bounds_checks_and_resident_memory(pytestconfig):
    cache = pytestconfig.cache
    assert cache is not None
    environment = {
        "NUMBA_BOUNDSCHECK": "1",
        # Apart from other kernels: numba does not know compiled code with checks from that without.
        "NUMBA_CACHE_DIR": str(cache.mkdir("kernels-with-bounds-checks")),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }
    command = (sys.executable, "-m", "tests.wire.hostile", "20000", "3")
    report = json.loads(run(*command, **environment))
    assert 200 < report["accepted"] < 4_000
    assert report["grown_bytes"] < 64 << 20


def test_memory_is_bounded_by_the_expected_length():
    random = Random(4)
    frames = good_frames()
    tracemalloc.start()
    try:
        for _ in range(1000):
            data, length = mutate(random.choice(frames), frames, random)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            known = known_for(length)
            with contextlib.suppress(WireError):
                decode(data, length, known=known)
            used = tracemalloc.get_traced_memory()[1] - before
            # The constant is for the largest frequency table with its 2^16 slots.
            assert used < 40 * length + 4 * len(data) + (1 << 19)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("length", "every"), [(1 << 20, 1), soak(5_000_000, 3)])
def test_a_short_frame_is_little_work_however_much_it_claims(length, every):
    known = known_for(length)
    frames = starved_frames(length)[::every]
    num_refused = 0
    for data, _ in frames:
        started = time.process_time()
        try:
            decode(data, length, known=known, threads=1)
        except WireError:
            num_refused += 1
        # An honest frame of a gradient takes 0.02 s, and one of width 16 up to a second.
        assert time.process_time() - started < 0.8, data.hex()
    assert num_refused > 50 / every


def test_the_context_coder_is_for_short_messages():
    levels = np.ones(context.LONGEST, np.uint8)
    payload = context.encode(levels, 3)
    for count in (context.LONGEST, context.LONGEST + 1):
        head = bytes([0x20 | Mode.CONTEXT, 0x11, 0, 0x3F]) + write_varint(count)
        sparse = bytes([0x20 | Mode.SPARSE]) + write_varint(count) + b"\x80\x01"
        for frame in (head + payload, sparse + write_varint(len(payload)) + payload):
            with (
                pytest.raises(WireError, match="1048577 levels in context")
                if (count > context.LONGEST)
                else contextlib.nullcontext()
            ):
                decode(sealed(frame, count), count)


def statistics_read(data):
    """Tell whether a frame of statistics is read; its values are finite then."""
    try:
        found = decode_statistics(data, SECTIONS)
    except WireError:
        return False
    assert np.isfinite(found.values).all()
    assert (len(found.values), len(found.counts)) == (5, 2)
    return True


def heads_read(data):
    """Tell whether an order, or a reply, is read; it is written again as it was then."""
    stamp = Stamp(1, 2, bytes(4))
    for read, known in ((Order.from_bytes, [ORDER]), (Reply.from_bytes, stamp)):
        try:
            message = read(data, known)
        except (WireError, MessageError):
            continue
        again = message.to_bytes(ORDER if isinstance(message, Order) else stamp)
        assert read(again, known) == message or "nan" in repr(message)
        return True
    return False


def merged():
    """Return the sum of a few entries."""
    public, written = start("auto"), []
    for number in range(1, 6):
        quantum = 2.0**-20 if number == 1 else None
        entry = Entry(number, None, of_position(number), 0.5, is_rounded=True, quantum=quantum)
        written.append(encode_entry(entry, None))
        public = advance(public, entry, MOVEMENT)
    merger = Merger(public)
    assert all(map(merger.add, reversed(written)))
    return merger.frame()


SECTIONS = (Section(3, "float32"), Section(2, "float64"), Section(2, "int"))
ORDER = Order("run", bytes(16), "auto", 4, 100, 0, 40, "float32", 1, 2, 0)


@cache
def frames_of(kind):
    """Return frames, and what tells of each whether it is read."""
    if kind == "messages":
        frames = good_frames()
        chosen = [*frames[1::12], *{data[0]: (data, length) for data, length in frames}.values()]
        return [(data, partial(accepts, length=length)) for data, length in chosen if len(data) > 1]
    if kind == "statistics":
        values, short = np.array([0.25, -3.0, 1e-3, np.pi, 2.0]), np.array([True, False, False])
        message = StatisticsMessage(values, np.array([5, -70000]), np.ones(3, np.bool_), short)
        return [(encode_statistics(message, SECTIONS, p), statistics_read) for p in PRECISIONS]
    if kind == "heads":
        said = {"digest": b"abcd", "frame": b"frame", "loss": 0.5, "fault": "no"}
        reply = Reply(1, 3, epoch=1, uploads=2, **said)
        later = replace(ORDER, round=300, uploads=2, noise=1.5, log=b"log", snapshot=b"snapshot")
        whole = [later.to_bytes(), reply.to_bytes()]
        short = [later.to_bytes(ORDER), reply.to_bytes(reply.base)]
        return [(head, heads_read) for head in whole + short]
    if kind == "merged":
        return [(merged(), partial(accepts_log, recipe="auto"))]
    written, after = entries(start(kind))
    frames = [encode_snapshot(after, base) for base in (start().parameters, None)]
    is_read = partial(accepts_log, recipe=kind)
    return [(frame, is_read) for frame in [encode_log(1, written), *frames]]


KINDS = ["lean", "auto", "merged", "statistics", "heads"]


@pytest.mark.parametrize("kind", ["messages", *KINDS])
def test_every_truncation_and_every_flipped_bit_is_noticed(kind):
    """A CRC-32 finds every single flipped bit and almost every truncation."""
    for data, is_read in frames_of(kind):
        assert is_read(data)
        assert not any(is_read(data[:end]) for end in range(1, len(data)))
        for bit in range(0, 8 * len(data), 3):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            assert not is_read(bytes(damaged))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, soak(2), soak(3)])
def test_damage_behind_a_right_checksum(kind, seed):
    """What is not refused is whole, and survives the wire."""
    frames, random = frames_of(kind), Random(seed)
    others, accepted = [(frame, 40) for frame, _ in frames], 0
    for _ in range(1000):
        data, is_read = random.choice(frames)
        body = bytearray(data[:-4])
        for _ in range(random.randrange(1, 4)):
            damage(body, others, random)
        accepted += is_read(seal(bytes(body)))
    assert 0 < accepted < 800
