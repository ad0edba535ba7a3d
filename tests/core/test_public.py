"""The public model on its exact grid, tracks, entries and logs: all follow the sum to the bit."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aqg.core.downlink import (
    PRIME,
    Condensed,
    Entry,
    Exact,
    Full,
    Public,
    advance,
    linear_digest,
    resolve_downlink,
)
from aqg.core.grids import (
    Grid,
    choose_quantum,
    largest_multiple,
    level_dtype,
    nearest_power_of_two,
    num_levels,
    round_up_to_bfloat16,
    snap,
)
from aqg.core.messages import DenseUpload, Upload, num_nonzero
from aqg.core.optimizers import SGD, Adam, Momentum
from aqg.core.policies import Tolerance
from aqg.core.quantizers import GridQuantizer, Request
from aqg.core.recipe import Recipe
from aqg.core.recipes import make_recipe
from aqg.core.server import (
    Model,
    Step,
    init_model,
    init_server,
    publish_round,
    take_message,
    take_step,
)
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
from aqg.core.types import from_arrays, to_arrays
from aqg.errors import MessageError, WireError
from aqg.protocol.log import ModelLog
from aqg.wire import entry as wire
from aqg.wire.entry import decode_vector, encode_vector

from tests.problems import tiny_problem
from tests.wire.logs import (
    LENGTH,
    MOVEMENT,
    entries,
    of_position,
    of_velocity,
    start,
)

NUM_PARAMS = 300
RECIPE = make_recipe("qsgd")
DOWNLINKS = [Exact(), Condensed(), Condensed(tolerance=0.0, ratio=5)]


def upload(seed, sign=1):
    levels = np.random.default_rng(seed).integers(0, 3, NUM_PARAMS)
    levels = levels if sign > 0 else 2 - levels
    return Upload(levels.astype(np.uint8), 0.125, 2, Grid.MIDTREAD)


def published(recipe, step, start, rounds, num_clients=1):
    """Yield the states after rounds in which clients send these uploads, and the entries."""
    state = init_server(recipe, start, num_clients, step)
    for uploads in rounds:
        for client, message in uploads.items():
            state = take_message(recipe, state, client, message)
        state, entry = publish_round(recipe, state, step)
        yield state, entry


def publish(recipe_name, downlink, rounds):
    recipe, start = make_recipe(recipe_name), np.ones(NUM_PARAMS)
    step = Step(0.1, downlink=downlink)
    states, entries = zip(*published(recipe, step, start, rounds, 3), strict=True)
    before = [init_server(recipe, start, 3, step), *states]
    return written([state.public for state in before], entries), states[-1]


@pytest.mark.parametrize("downlink", DOWNLINKS)
@pytest.mark.parametrize("recipe", ["lean", "auto", "qsgd"])
def test_equal_sums_make_equal_entries(recipe, downlink):
    one, two, three, back = upload(1), upload(2), upload(3), upload(3, sign=-1)
    sent = [{0: one, 1: two}, {2: one}, {}, {0: two}, {}]
    swapped = [{0: two, 2: one}, {1: one}, {0: three, 1: back}, {2: two}, {}]
    if recipe == "lean":  # a mirror that moved there and back is where it was
        swapped[4] = {1: three, 2: back}
    expected, first = publish(recipe, downlink, sent)
    found, second = publish(recipe, downlink, swapped)
    assert found == expected
    assert first.parameters.tobytes() == second.parameters.tobytes()
    assert len(set(expected)) > 1
    if recipe == "lean" and downlink in DOWNLINKS[:2]:  # a silent round is one byte
        assert [len(expected[2]), len(expected[4])] == [1, 1]


def test_the_state_given_is_left_as_it_was():
    for name, downlink in product(("lean", "auto"), DOWNLINKS):
        recipe = make_recipe(name)
        step = Step(0.1, optimizer=Adam(), downlink=downlink)
        state = init_server(recipe, np.ones(NUM_PARAMS), 2, step)
        state = take_message(recipe, state, 0, upload(1))
        state = take_message(recipe, state, 1, upload(2))
        first, again = (publish_round(recipe, state, step)[0].model for _ in range(2))
        for name in ("parameters", "velocity", "rest"):
            assert getattr(first, name).tobytes() == getattr(again, name).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", [SGD(), Momentum(0.7), Adam()])
@pytest.mark.parametrize("downlink", [Full(), Exact()])
@pytest.mark.parametrize("recipe", ["lean", "auto"])
def test_torch_takes_the_same_step_to_the_bit(recipe, downlink, optimizer, dtype):
    from aqg.sim.simulation import model_in
    from aqg.sim.torch_backend import TorchBackend

    rng, chosen = np.random.default_rng(5), make_recipe(recipe)
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        space = TorchBackend(tiny_problem(), device)
        step = Step(0.01, optimizer=optimizer, downlink=downlink)
        model = init_model(chosen, rng.normal(size=NUM_PARAMS).astype(dtype), step)
        there = model_in(space.put, model)
        for _ in range(10):
            total = rng.normal(size=NUM_PARAMS)
            step = step._replace(size=rng.random(), sampled=rng.random())
            model = model._replace(total=total, is_moved=True)
            there = there._replace(total=space.put(total), is_moved=True)
            model, _ = take_step(NumpySpace(), chosen, model, step, 3)
            there, _ = take_step(space, chosen, there, step, 3)
            assert space.get(there.parameters).tobytes() == model.parameters.tobytes()


def test_the_default_is_the_recipes_own():
    expected = {"gd": Full(), "auto": Condensed(ratio=0.5, away=0.5), "lean": Condensed()}
    expected |= {"stc:keep=0.02": Condensed(), "stc-both:keep=0.2": Condensed(keep=0.2)}
    named = {"exact": Exact(), "full": Full(), "condensed:keep=1": Condensed(keep=1)}
    for recipe, own in expected.items():
        for spec, downlink in {**named, "auto": own}.items():
            assert resolve_downlink(spec, make_recipe(recipe)) == downlink


@pytest.mark.parametrize("shared", [0, 100, 200])
@pytest.mark.parametrize(("num_sent", "expected"), [(200, 100), (40, 32)])
def test_entries_are_half_as_long_as_what_clients_send(num_sent, expected, shared):
    """However much two clients have in common; the state is written and read in between."""
    recipe, length, downlink = make_recipe("auto"), 2_000, Condensed(ratio=0.5)
    step = Step(0.1, downlink=downlink)
    state = init_server(recipe, np.ones(length), 2, step)
    for client, first in enumerate((0, max(0, num_sent - shared))):
        levels = np.ones(length, np.uint8)
        levels[first : first + num_sent] = 2
        state = take_message(recipe, state, client, Upload(levels, 0.125, 2, Grid.MIDTREAD))
    state = state._replace(model=from_arrays(Model, to_arrays(state.model)))
    assert state.model.num_sent == 2 * num_sent
    assert state.model.upload_energy == 2 * num_sent * 0.125**2
    state, entry = publish_round(recipe, state, step)
    assert isinstance(entry.position, Upload)
    assert num_nonzero(entry.position) == expected
    assert (state.model.num_sent, state.model.upload_energy) == (0, 0.0)


def test_long_entries_have_four_bits_for_each_coordinate_and_those_for_few_clients_are_shorter():
    """One magnitude for all would say little of each; what is rounded off is sent later."""
    message = Upload(np.array([0, 5, 14, 16, 23, 30], np.uint8), 0.125, 5, Grid.MIDTREAD)
    width, step = 15 * 0.125 / 7, Step(1.0, downlink=Condensed())
    rounds = published(make_recipe("auto"), step, np.zeros(6), [{0: message}] * 8)
    for number, (state, entry) in enumerate(rounds, 1):
        assert isinstance(entry.position, Upload)
        assert entry.position.width == 4
        assert state.parameters == pytest.approx(-number * message.values(np.float64), abs=width)

    downlink = Condensed(ratio=0.5, away=0.5)
    long, short = (downlink.of_position(10_000, 4_000, 10, p).quantizer for p in (0.25, 0.04))
    vector = np.arange(10_000.0)
    assert num_nonzero(long.quantize(vector, Request(2))) == 200
    assert num_nonzero(short.quantize(vector, Request(2))) == 80


FEW = 64
STEP = Step(1.0, downlink=Condensed(keep=0.25))


def drawn(rng, step):
    return Upload(rng.integers(0, 15, FEW).astype(np.uint8), step, 4, Grid.MIDTREAD)


def played(start, steps, seed=0):
    """Publish rounds in which uploads have these steps; return what clients held, and entries."""
    rng = np.random.default_rng(seed)
    messages = [drawn(rng, size) for size in steps]
    held, entries, total = [Public.first(RECIPE, start)], [], np.zeros(FEW)
    rounds = published(RECIPE, STEP, start, [{0: message} for message in messages])
    for message, (state, entry) in zip(messages, rounds, strict=True):
        total += message.values(np.float64)
        held.append(advance(held[-1], entry, RECIPE.movement))
        entries.append(entry)
        assert held[-1].parameters.tobytes() == state.parameters.tobytes()
        assert held[-1].quantum == state.model.quantum
        waiting = state.model.rest.astype(np.float64)
        shown = start.astype(np.float64) - state.parameters.astype(np.float64)
        np.testing.assert_allclose(shown + waiting, total, rtol=1e-6, atol=1e-6 * max(steps))
    return held, entries


powers = st.integers(-30, 8).map(lambda k: 2.0**k)
dtypes = st.sampled_from(["float32", "float64"])
anything = given(st.lists(powers, min_size=1, max_size=12), dtypes, powers, st.integers(1, 4))


def somewhere(dtype, radius, seed):
    return (radius * np.random.default_rng(seed).normal(size=FEW)).astype(dtype)


@anything
def test_positions_are_multiples_of_a_quantum(steps, dtype, radius, seed):
    """However long steps are, and however far they lead: a coarser quantum answers overflow."""
    held, entries = played(somewhere(dtype, radius, seed), steps)
    for before, public, entry in zip(held[:-1], held[1:], entries, strict=True):
        if not public.quantum:
            continue
        multiples = public.parameters.astype(np.float64) / public.quantum
        assert np.array_equal(multiples, np.rint(multiples))
        assert np.abs(multiples).max() <= largest_multiple(np.dtype(dtype))
        if entry.position is not None:
            assert entry.position.step >= public.quantum
            assert nearest_power_of_two(entry.position.step) == entry.position.step
            base = snap(before.parameters, public.quantum)
            numbers = base, entry.position.values(np.float64), public.parameters
            for old, value, new in zip(*map(np.ndarray.tolist, numbers), strict=True):
                assert Fraction(old) + Fraction(value) == Fraction(new)


def test_steps_below_the_quantum_wait():
    """What is less than half a quantum is said when there is more of it."""
    start = np.full(FEW, 2.0**12, np.float32)
    _, entries = played(start, [2.0**-14] * 40)
    said = [entry for entry in entries if entry.position is not None]
    assert 0 < len(said) < len(entries)
    # Of a model of zeros, the first steps name the quantum.
    assert choose_quantum(0.0, 2.0**-6, np.dtype("float32")) == 2.0**-22
    assert choose_quantum(0.0, 2.0**-6, np.dtype("float64")) == 2.0**-51


def test_rounding_is_the_same_everywhere():
    rng = np.random.default_rng(3)
    for dtype in (np.float32, np.float64):
        vector = (rng.integers(-40, 40, 1000) / 8).astype(dtype)
        for quantum in (0.25, 1.0, 4.0):
            expected = snap(vector, quantum)
            assert snap(torch.from_numpy(vector), quantum).numpy().tobytes() == expected.tobytes()
            assert not np.signbit(expected[expected == 0]).any()


def written(held, entries):
    pairs = zip(held[:-1], entries, strict=True)
    return [wire.encode_entry(entry, wire.known_velocity(public)) for public, entry in pairs]


def merged(held, data, first):
    """Return the frame of all entries from the one of this place on."""
    merger = wire.Merger(held[-1])
    is_whole = all(merger.add(entry) for entry in reversed(data[first:]))
    return merger.frame() if is_whole else None


def content(public):
    return public.parameters.tobytes(), public.round, public.history, public.quantum


@anything
def test_merged_entries_lead_where_each_of_them_does(steps, dtype, radius, seed):
    """From wherever a client left off; not across a round that names another quantum."""
    held, entries = played(somewhere(dtype, radius, seed), steps)
    entries.append(Entry(held[-1].round, is_step=False))
    held.append(advance(held[-1], entries[-1], RECIPE.movement))
    data = written(held, entries)
    for first in range(len(entries)):
        frame = merged(held, data, first)
        names = [n for n, entry in enumerate(entries) if entry.quantum is not None and n >= first]
        says = [n for n, entry in enumerate(entries) if entry.position is not None and n >= first]
        assert (frame is None) == (len(names) > 1 or bool(names and says[0] < names[0]))
        if frame is None:
            continue
        assert wire.log_rounds(frame) == range(first + 1, len(data) + 1)
        assert content(wire.follow_log(frame, held[first], RECIPE.movement)) == content(held[-1])
        assert wire.log_since(frame, first + 1) == frame
        assert wire.log_since(frame, len(data) + 1) == wire.encode_log(len(data) + 1, [])
        with pytest.raises(WireError, match="the model here is at"):
            wire.follow_log(frame, held[first + 1], RECIPE.movement)


def test_a_client_gets_what_is_shorter():
    """Many entries of the same coordinates make a sum that is shorter than they are."""
    start = np.linspace(-1, 1, FEW, dtype=np.float32)
    held, entries = played(start, [2.0**-6] * 20)
    data, log = written(held, entries), ModelLog(merges=True)
    for entry in data:
        log.append(entry)
    frame = merged(held, data, 4)
    found = log.deliver(5, lambda: bytes(10_000), lambda: held[-1])
    assert (found.snapshot, found.merged, found.num_bytes) == (b"", frame, len(frame))
    assert found.num_bytes < len(log.frame(5))
    assert not ModelLog(1, data).deliver(5, lambda: bytes(10_000), lambda: held[-1]).merged
    assert log.deliver(20, never, lambda: held[-1]).num_bytes == len(log.frame(20))
    whole = merged(held, data, 0)
    with pytest.raises(WireError, match="merged that move a velocity"):
        wire.follow_log(whole, Public.first(make_recipe("lean"), start), RECIPE.movement)


def never():
    raise AssertionError("no snapshot is wanted here")


def coefficient(place):
    """Return SplitMix64 of a place, by plain integers."""
    whole = (1 << 64) - 1
    bits = (place + 1) * 0x9E3779B97F4A7C15 & whole
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & whole
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & whole
    return (bits ^ bits >> 31) & PRIME


@given(st.lists(st.integers(-(2**54) + 1, 2**54 - 1), max_size=30), st.integers(0, 2**40))
def test_the_linear_digest_is_what_plain_integers_make(numbers, first):
    expected = sum(coefficient(first + place) * k for place, k in enumerate(numbers))
    assert linear_digest(np.array(numbers, np.int64), first) == expected % PRIME


@anything
def test_marks_follow_entries(steps, dtype, radius, seed):
    """What an entry makes of the mark is that of all coordinates; any other bit has another one."""
    held, entries = played(somewhere(dtype, radius, seed), steps)
    data = written(held, entries)
    for public in held[1:]:
        assert (public.mark is None) == (not public.quantum)
        assert public.mark == public.marked().mark
        if public.quantum:
            other = public.parameters.copy()
            other[7] += public.quantum
            track = public.track._replace(position=other[None])
            changed = public._replace(track=track)
            assert changed.marked().digest() != public.digest()
    frame = merged(held, data, 0)
    if frame is not None:
        found = wire.follow_log(frame, held[0], RECIPE.movement)
        assert found.digest() == held[-1].digest()


def test_damage_below_the_quantum_changes_the_mark():
    position = np.array([[0.25, -0.5, 0.0]])
    public = Public.first(make_recipe("auto"), position[0])._replace(round=3, quantum=2.0**-20)
    public, track = public.marked(), public.track
    for place, value in ((0, np.nextafter(0.25, 1)), (1, np.nextafter(-0.5, 0)), (2, -0.0)):
        damaged = position.copy()
        damaged[0, place] = value
        found = public._replace(track=track._replace(position=damaged), mark=None)
        assert found.marked().mark != public.mark
        assert found.digest() != public.digest()


NUM_TRACKS, SIZE = 4, 9
SPACE = NumpySpace()
CODER = Recipe(policy=Tolerance(), quantizer=GridQuantizer(Grid.MIDTREAD, 4), max_staleness=5)


def part(rng, dtype):
    """Draw a correction of any kind and of any size."""
    scale = float(10.0 ** rng.integers(-12, 12))
    kind = rng.integers(4)
    if kind == 0:
        return DenseUpload((scale * rng.normal(size=SIZE)).astype(np.float32))
    if kind == 1:
        new = (scale * rng.normal(size=SIZE)).astype(dtype)
        return Change(np.zeros(SIZE, dtype), new)
    grid = Grid.MIDTREAD if kind == 2 else Grid.MIDRISE
    width = int(rng.integers(1, 17))
    levels = rng.integers(0, num_levels(grid, width), SIZE).astype(level_dtype(width))
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
    mirrors = init_track(SIZE, np.dtype(dtype), NUM_TRACKS)
    clients = [init_track(SIZE, np.dtype(dtype)) for _ in range(NUM_TRACKS)]
    first, start, total, expected = clients[0], bits(clients[0]), np.zeros(SIZE), np.zeros(SIZE)
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
    from aqg.sim.torch_backend import TorchBackend

    from tests.problems import tiny_problem

    space = TorchBackend(tiny_problem(), "cpu")
    here, total = np.zeros((NUM_TRACKS, SIZE), dtype), np.zeros(SIZE)
    there, other = space.put(here), space.put(total)
    for said in uploads_of(seed, dtype):
        SPACE.move(memory, here, total, *said)
        space.move(memory, there, other, *said)
        assert space.get(there).tobytes() == here.tobytes()


@given(seeds, st.sampled_from(["float32", "float64"]), st.booleans())
def test_a_track_moves_by_its_velocity_and_by_what_is_said(seed, dtype, in_place):
    rng = np.random.default_rng(seed)
    track = init_track(SIZE, np.dtype(dtype), has_velocity=True)
    position, velocity = np.zeros(SIZE, dtype), np.zeros(SIZE)
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
    truths = (10.0 ** rng.integers(-3, 3) * rng.normal(size=(NUM_TRACKS, SIZE))).astype(dtype)
    tracks, waited = init_track(SIZE, np.dtype(dtype), NUM_TRACKS), np.zeros(NUM_TRACKS, int)
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
        SPACE.move(Memory.INNOVATION, tracks.position, np.zeros(SIZE), *said)
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


def test_golden_bytes():
    assert wire.encode_entry(Entry(5), None).hex() == "00"
    assert wire.encode_entry(Entry(5, is_step=False), None).hex() == "10"
    assert wire.encode_entry(Entry(5, movement=1.5, is_rounded=True), None).hex() == "04c03f"
    assert wire.encode_entry(Entry(5, quantum=2.0**-20), None).hex() == "2027"
    short = Entry(5, None, of_position(0), 2.0)
    assert wire.encode_entry(short, None).hex() == "0e0000000000000040" + GOLDEN_POSITION
    assert wire.encode_log(300, [b"\0", b"\x10"]).hex() == GOLDEN_LOG
    snapshot = wire.encode_snapshot(start(), np.linspace(-1, 1, LENGTH, dtype=np.float32))
    assert snapshot.hex() == GOLDEN_SNAPSHOT


GOLDEN_POSITION = "090311003f0502cc55dd"
GOLDEN_LOG = "62ac02020010e47113f5"
GOLDEN_SNAPSHOT = "730101000004000501000400050100023de3b4e89f8a"


def test_what_is_out_of_order_is_named():
    written, after = entries(start())
    log = wire.encode_log(1, written)
    with pytest.raises(WireError, match="begins with round 1; the model here is at 13"):
        wire.follow_log(log, after, MOVEMENT)
    with pytest.raises(WireError, match="begins with round 4; the model here is at 1"):
        wire.follow_log(wire.encode_log(4, written[3:]), start(), MOVEMENT)
    with pytest.raises(WireError, match="changes a velocity; this model has none"):
        wire.follow_log(log, start("auto"), MOVEMENT)
    with pytest.raises(MessageError, match="changes a velocity; the model of this recipe"):
        advance(start("auto"), Entry(1, of_velocity(0)), MOVEMENT)
    snapshot = wire.encode_snapshot(after, start().parameters)
    with pytest.raises(WireError, match="relative to a starting model"):
        wire.decode_snapshot(snapshot, start(), None)
    with pytest.raises(MessageError, match="entry 3 cannot follow"):
        advance(start(), Entry(3), MOVEMENT)


def test_the_head_of_an_entry_is_checked():
    for entry, message in (
        ("04c0", "inside a number"),
        ("04c0bf", "the movement in entry 1 is -1.5"),
        ("08", "flags of entry 1 are 08"),
        ("14c03f", "flags of entry 1 are 14"),
        ("40", "flags of entry 1 are 40"),
        ("30", "flags of entry 1 are 30"),
        ("20fe01", r"a quantum of 2\^127; exponents go from -126 to 101"),
    ):
        with pytest.raises(WireError, match=message):
            wire.follow_log(wire.encode_log(1, [bytes.fromhex(entry)]), start(), MOVEMENT)


def test_entries_of_another_run_are_refused():
    """An entry that was coded with another sum as context does not decode to something else."""
    rng = np.random.default_rng(0)
    rows = rng.integers(-1, 2, 4000)
    first = Public.first(make_recipe("lean"), np.zeros(4000, np.float32))
    track = first.track._replace(velocity=rows[None] / 8.0, direction=rows[None].astype(np.int8))
    big = first._replace(track=track)
    levels = (3 - 2 * rows).astype(np.uint8)
    entry = Entry(1, Upload(levels, 0.125, 3, Grid.MIDTREAD), None, 1.0)
    log = wire.encode_log(1, [wire.encode_entry(entry, wire.known_velocity(big))])
    assert wire.follow_log(log, big, MOVEMENT).round == 2
    changed = big._replace(track=track._replace(velocity=np.roll(track.velocity, 1)))
    with pytest.raises(WireError, match="another reference"):
        wire.follow_log(log, changed, MOVEMENT)


NUMBERS = st.sampled_from([0.0, -0.0, 0.5, -0.25, 3.0, 1e-300, 1e300])
NUMBERS |= st.floats(allow_nan=False, width=64)
PAIRS = st.integers(1, 60).flatmap(lambda n: arrays.arrays(np.float64, (2, n), elements=NUMBERS))


@given(PAIRS, st.sampled_from(["float32", "float64"]))
def test_vectors_come_back_to_the_bit(pair, dtype):
    with np.errstate(over="ignore"):
        new, old = pair.astype(dtype)
    data = encode_vector(new, old)
    assert decode_vector(np.frombuffer(data, np.uint8), old).tobytes() == new.tobytes()


def test_sums_of_quantized_vectors_cost_about_what_their_frames_do():
    """Ten sparse ternary uploads: their sum takes no more than they did."""
    from aqg.wire import encode

    rng = np.random.default_rng(1)
    total, frames = np.zeros(100_000), 0
    for _ in range(10):
        levels = np.ones(len(total), np.uint8)
        levels[rng.choice(len(total), 40, replace=False)] = rng.choice([0, 2], 40)
        upload = Upload(levels, float(1 + rng.integers(128) / 128) / 512, 2, Grid.MIDTREAD)
        total += upload.values(np.float64)
        frames += len(encode(upload))
    assert len(encode_vector(total, np.zeros_like(total))) < frames
