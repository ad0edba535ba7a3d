"""Hostile frames: only `WireError` or a valid message, in bounded memory, never a crash."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from random import Random

import pytest

from aqg.errors import WireError
from aqg.wire import decode
from aqg.wire.varint import write_varint

from tests.wire.hostile import attack, good_frames, known_for, mutate, sealed

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_thousand_damaged_frames(seed: int) -> None:
    outcomes = attack(50_000, seed)
    assert outcomes.total() == 50_000
    # Some damage makes another valid message; if none or all did, the test would test nothing.
    assert 500 < outcomes["accepted"] < 10_000


def test_with_bounds_checks_and_resident_memory(tmp_path: Path) -> None:
    environment = dict(
        os.environ,
        NUMBA_BOUNDSCHECK="1",
        NUMBA_CACHE_DIR=str(tmp_path),  # the cache does not know compiled code with checks apart
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    )
    result = subprocess.run(
        [sys.executable, "-m", "tests.wire.hostile", "20000", "3"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["refused"] + report["accepted"] == 20_000
    assert report["grown_bytes"] < 64 << 20


@pytest.mark.parametrize("position", [1, 4, 5, 6])
@pytest.mark.parametrize("claimed", [1 << 31, 1 << 40, (1 << 63) - 1])
def test_a_claimed_size_reserves_nothing(position: int, claimed: int) -> None:
    for data, length in good_frames()[::7]:
        forged = sealed(data[:position] + write_varint(claimed) + data[position:-4], length)
        tracemalloc.start()
        with contextlib.suppress(WireError):
            decode(forged, length, known=known_for(length))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


def test_memory_is_bounded_by_the_expected_length() -> None:
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


def test_every_truncation_and_every_flipped_bit_is_noticed() -> None:
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
