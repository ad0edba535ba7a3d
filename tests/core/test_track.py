"""Tracks: whatever is said, in whatever batches, both ends hold the same bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.core.grids import Grid, level_dtype, num_levels, round_up_to_bfloat16
from aqg.core.messages import DenseUpload, Upload
from aqg.core.policies import Tolerance
from aqg.core.quantizers import GridQuantizer
from aqg.core.recipe import Recipe
from aqg.core.space import NumpySpace
from aqg.core.track import (
    Change,
    Flow,
    Memory,
    correct,
    follow,
    init_track,
    next_direction,
    who_sends,
)

NUM_TRACKS, LENGTH = 4, 9
SPACE = NumpySpace()
CODER = Recipe(policy=Tolerance(), quantizer=GridQuantizer(Grid.MIDTREAD, 4), max_staleness=5)


def part(rng, dtype):
    """Draw a correction of any kind and of any size."""
    scale = float(10.0 ** rng.integers(-12, 12))
    kind = rng.integers(4)
    if kind == 0:
        return DenseUpload((scale * rng.normal(size=LENGTH)).astype(np.float32))
    if kind == 1:
        new = (scale * rng.normal(size=LENGTH)).astype(dtype)
        return Change(np.zeros(LENGTH, dtype), new)
    grid = Grid.MIDTREAD if kind == 2 else Grid.MIDRISE
    width = int(rng.integers(1, 17))
    levels = rng.integers(0, num_levels(grid, width), LENGTH).astype(level_dtype(width))
    return Upload(levels, round_up_to_bfloat16(scale), width, grid)


def bits(track):
    return [np.ascontiguousarray(field).tobytes() for field in track]


def rounds(seed, dtype):
    """Draw what is said in some rounds: of which tracks, and what of each."""
    rng = np.random.default_rng(seed)
    for _ in range(rng.integers(1, 7)):
        rows = np.flatnonzero(rng.random(NUM_TRACKS) < 0.5)
        yield rows, [part(rng, dtype) for _ in rows]


def uploads_of(seed, dtype):
    """Draw the same without changes, which no client sends."""
    for rows, parts in rounds(seed, dtype):
        kept = [k for k, p in enumerate(parts) if not isinstance(p, Change)]
        if kept:
            yield rows[kept], [parts[k] for k in kept], 0.5 + np.arange(len(kept)) / 4


def moved(vector, part):
    """Return a vector after a correction, or none."""
    if part is None:
        return vector
    return part.new.copy() if isinstance(part, Change) else vector + part.values(vector.dtype.type)


seeds = st.integers(0, 2**32)
memories = st.sampled_from([Memory.INNOVATION, Memory.LATEST])


@given(seeds, st.sampled_from(["float32", "float64"]), memories)
def test_both_ends_hold_the_same_bits(seed, dtype, memory):
    """The server moves all mirrors where they are; a client follows its own and keeps the old."""
    mirrors = init_track(LENGTH, np.dtype(dtype), NUM_TRACKS)
    clients = [init_track(LENGTH, np.dtype(dtype)) for _ in range(NUM_TRACKS)]
    first, start, total, expected = clients[0], bits(clients[0]), np.zeros(LENGTH), np.zeros(LENGTH)
    for rows, uploads, weights in uploads_of(seed, dtype):
        SPACE.move(memory, mirrors.position, total, rows, uploads, weights)
        for row, upload in zip(rows.tolist(), uploads, strict=True):
            mirrors.direction[row] = next_direction(mirrors.direction[row], upload)
        mirrors.is_held[rows] = True
        for row, upload, weight in zip(rows.tolist(), uploads, weights, strict=True):
            old, clients[row] = clients[row], follow(clients[row], upload, memory=memory)
            expected += weight * (clients[row].position[0].astype(np.float64) - old.position[0])
    assert np.array_equal(total, expected)
    for row, client in enumerate(clients):
        assert bits(client) == bits([field[row : row + 1] for field in mirrors])
    assert bits(first) == start


@given(seeds, st.sampled_from(["float32", "float64"]), memories)
def test_torch_moves_to_the_same_bits(seed, dtype, memory):
    pytest.importorskip("torch")
    from aqg.sim.torch_backend import TorchBackend

    from tests.problems import tiny_problem

    space = TorchBackend(tiny_problem(), "cpu")
    here, total = np.zeros((NUM_TRACKS, LENGTH), dtype), np.zeros(LENGTH)
    there, other = space.put(here), space.put(total)
    for said in uploads_of(seed, dtype):
        SPACE.move(memory, here, total, *said)
        space.move(memory, there, other, *said)
        assert space.get(there).tobytes() == here.tobytes()


@given(seeds, st.sampled_from(["float32", "float64"]), st.booleans())
def test_a_track_moves_by_its_velocity_and_by_what_is_said(seed, dtype, in_place):
    rng = np.random.default_rng(seed)
    track = init_track(LENGTH, np.dtype(dtype), has_velocity=True)
    position, velocity = np.zeros(LENGTH, dtype), np.zeros(LENGTH)
    for _ in range(6):
        before, start = track, bits(track)
        step = part(rng, "float64") if rng.random() < 0.5 else None
        said = part(rng, dtype) if rng.random() < 0.5 else None
        track = follow(track, said, step, in_place=in_place)
        velocity = moved(velocity, step)
        position = moved(position + velocity.astype(dtype), said)
        assert track.position[0].tobytes() == position.tobytes()
        assert track.velocity[0].tobytes() == velocity.tobytes()
        assert in_place or bits(before) == start


@given(seeds, st.sampled_from(["float32", "float64"]), st.floats(0, 10))
def test_corrections_bring_a_track_within_its_tolerance(seed, dtype, tolerance):
    """Of one that is near enough nothing is said, unless for long; blocks do not matter."""
    rng = np.random.default_rng(seed)
    truths = (10.0 ** rng.integers(-3, 3) * rng.normal(size=(NUM_TRACKS, LENGTH))).astype(dtype)
    tracks, waited = init_track(LENGTH, np.dtype(dtype), NUM_TRACKS), np.zeros(NUM_TRACKS, int)
    everyone = np.arange(NUM_TRACKS)
    for _ in range(12):
        flow = Flow(truths, tolerance, SPACE)
        gaps = correct(CODER, flow, tracks.position, everyone, waited)
        uploads = gaps.uploads
        squares = np.sum((truths - tracks.position).astype(np.float64) ** 2, axis=1)
        is_sent = np.isin(everyone, gaps.senders)
        assert np.array_equal(is_sent, (gaps.innovation.squared_norm > tolerance) | (waited >= 5))
        assert gaps.innovation.squared_norm == pytest.approx(squares, rel=1e-5)
        for row in everyone.tolist():
            own = slice(row, row + 1)
            some = flow._replace(vectors=truths[own]), tracks.position, everyone[own], waited[own]
            assert list(correct(CODER, *some).uploads) == [
                u for m, u in zip(gaps.senders, uploads, strict=True) if m == row
            ]
        said = gaps.senders, uploads, np.ones(len(uploads))
        SPACE.move(Memory.INNOVATION, tracks.position, np.zeros(LENGTH), *said)
        waited = gaps.skipped_rounds
        after = np.sum((truths - tracks.position).astype(np.float64) ** 2, axis=1)
        assert (after <= squares * (1 + 1e-6) + 1e-30).all()
    assert (after[squares > tolerance] < squares[squares > tolerance]).all()


CLIENT = st.tuples(st.booleans(), st.booleans(), st.integers(0, 5))


@given(st.lists(CLIENT, max_size=20), st.integers(1, 4))
def test_everyone_sends_or_is_skipping_or_is_out_of_range(clients, max_staleness):
    columns = np.array(clients, np.int64).reshape(-1, 3)
    wanting, in_range = columns[:, 0] == 1, columns[:, 1] == 1
    before, after = columns[:, 2].copy(), columns[:, 2].copy()
    senders, faulty = who_sends(wanting, in_range, after, max_staleness)

    send = (wanting | (before >= max_staleness)) & in_range
    assert senders.tolist() == np.flatnonzero(send).tolist()
    assert faulty.tolist() == np.flatnonzero(~in_range).tolist()
    expected = np.where(send, 0, before + (in_range & ~send))
    assert after.tolist() == expected.tolist()
