"""Hostile frames: only `WireError` or a valid message, in bounded memory, never a crash."""

import contextlib
import json
import os
import sys
import time
import tracemalloc
from pathlib import Path
from random import Random

import numpy as np
import pytest

from aqg.errors import WireError
from aqg.wire import context, decode
from aqg.wire.frame import Mode
from aqg.wire.varint import write_varint

from tests.commands import run
from tests.problems import soak
from tests.wire.hostile import attack, good_frames, known_for, mutate, sealed, starved_frames

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("count", "seed"), [(20_000, 1), soak(50_000, 2)])
def test_damaged_frames(count, seed):
    outcomes = attack(count, seed)
    assert outcomes.total() == count
    # Some damage makes another valid message; if none or all did, the test would test nothing.
    assert count / 100 < outcomes["accepted"] < count / 5


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
    assert report["refused"] + report["accepted"] == 20_000
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


@pytest.mark.parametrize(
    ("length", "every"), [(1 << 20, 1), pytest.param(5_000_000, 3, marks=pytest.mark.soak)]
)
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


def test_every_truncation_and_every_flipped_bit_is_noticed():
    """A CRC-32 finds every single flipped bit and almost every truncation."""
    for data, length in good_frames()[1::12]:
        for end in range(1, len(data)):
            with pytest.raises(WireError):
                decode(data[:end], length, known=known_for(length))
        for bit in range(0, 8 * len(data), 3):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError):
                decode(damaged, length, known=known_for(length))
