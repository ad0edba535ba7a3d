"""The public model on its exact grid: only sums leave the server, and all follow to the bit."""

import contextlib
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from aqg.core.grids import Grid, choose_quantum, largest_multiple, nearest_power_of_two, snap
from aqg.core.messages import Upload, num_nonzero
from aqg.core.optimizers import SGD, Adam, Momentum
from aqg.core.quantizers import Request
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
from aqg.core.types import from_arrays, to_arrays
from aqg.errors import WireError
from aqg.protocol.log import ModelLog
from aqg.wire.entry import (
    Merger,
    encode_entry,
    encode_log,
    follow_log,
    known_velocity,
    log_rounds,
    log_since,
)
from aqg.wire.varint import seal as sealed

from tests.problems import tiny_problem

LENGTH = 300
RECIPE = make_recipe("qsgd")
DOWNLINKS = [Exact(), Condensed(), Condensed(tolerance=0.0, ratio=5)]


def upload(seed, sign=1):
    levels = np.random.default_rng(seed).integers(0, 3, LENGTH)
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
    recipe, step, start = make_recipe(recipe_name), Step(0.1, downlink=downlink), np.ones(LENGTH)
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
        state = init_server(recipe, np.ones(LENGTH), 2, step)
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
    torch = pytest.importorskip("torch")
    from aqg.sim.simulation import model_in
    from aqg.sim.torch_backend import TorchBackend

    rng, chosen = np.random.default_rng(5), make_recipe(recipe)
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        space = TorchBackend(tiny_problem(), device)
        step = Step(0.01, optimizer=optimizer, downlink=downlink)
        model = init_model(chosen, rng.normal(size=LENGTH).astype(dtype), step)
        there = model_in(space.put, model)
        for _ in range(10):
            total = rng.normal(size=LENGTH)
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
    for client, start in enumerate((0, max(0, num_sent - shared))):
        levels = np.ones(length, np.uint8)
        levels[start : start + num_sent] = 2
        state = take_message(recipe, state, client, Upload(levels, 0.125, 2, Grid.MIDTREAD))
    state = state._replace(model=from_arrays(Model, to_arrays(state.model)))
    assert state.model.num_sent == 2 * num_sent
    assert state.model.upload_energy == 2 * num_sent * 0.125**2
    state, entry = publish_round(recipe, state, step)
    assert isinstance(entry.position, Upload)
    assert num_nonzero(entry.position) == expected
    assert (state.model.num_sent, state.model.upload_energy) == (0, 0.0)


def test_entries_are_shorter_where_few_clients_are_asked():
    downlink = Condensed(ratio=0.5, away=0.5)
    long, short = (downlink.of_position(10_000, 4_000, 10, p).quantizer for p in (1.0, 0.25))
    vector = np.arange(10_000.0)
    assert num_nonzero(long.quantize(vector, Request(2))) == 200
    assert num_nonzero(short.quantize(vector, Request(2))) == 100


def test_an_entry_that_would_have_most_coordinates_has_four_bits_for_each():
    """One magnitude for all would say little of each; what is rounded off is sent later."""
    message = Upload(np.array([0, 5, 14, 16, 23, 30], np.uint8), 0.125, 5, Grid.MIDTREAD)
    width, step = 15 * 0.125 / 7, Step(1.0, downlink=Condensed())
    rounds = published(make_recipe("auto"), step, np.zeros(6), [{0: message}] * 8)
    for number, (state, entry) in enumerate(rounds, 1):
        assert isinstance(entry.position, Upload)
        assert entry.position.width == 4
        assert state.parameters == pytest.approx(-number * message.values(np.float64), abs=width)


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


def test_overflow_makes_the_quantum_coarser():
    start = np.linspace(-1, 1, FEW, dtype=np.float32)
    held, entries = played(start, [2.0**-9] * 3 + [2.0**3] * 4)
    quanta = [entry.quantum for entry in entries]
    assert quanta[0] == 2.0**-22
    assert held[-1].quantum > quanta[0]
    assert held[-1].quantum == [q for q in quanta if q is not None][-1]
    assert quanta.count(None) >= 4


def test_steps_below_the_quantum_wait():
    """What is less than half a quantum is said when there is more of it."""
    start = np.full(FEW, 2.0**12, np.float32)
    _, entries = played(start, [2.0**-14] * 40)
    said = [entry for entry in entries if entry.position is not None]
    assert 0 < len(said) < len(entries)


def test_rounding_is_the_same_everywhere():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    for dtype in (np.float32, np.float64):
        vector = (rng.integers(-40, 40, 1000) / 8).astype(dtype)
        for quantum in (0.25, 1.0, 4.0):
            expected = snap(vector, quantum)
            assert snap(torch.from_numpy(vector), quantum).numpy().tobytes() == expected.tobytes()
            assert not np.signbit(expected[expected == 0]).any()


def test_the_first_steps_name_the_quantum_of_a_model_of_zeros():
    assert choose_quantum(0.0, 2.0**-6, np.dtype("float32")) == 2.0**-22
    assert choose_quantum(0.0, 2.0**-6, np.dtype("float64")) == 2.0**-51


def written(held, entries):
    return [
        encode_entry(entry, known_velocity(public))
        for public, entry in zip(held[:-1], entries, strict=True)
    ]


def merged(held, data, first):
    """Return the frame of all entries from the one of this place on."""
    merger = Merger(held[-1])
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
        assert log_rounds(frame) == range(first + 1, len(data) + 1)
        assert content(follow_log(frame, held[first], RECIPE.movement)) == content(held[-1])
        assert log_since(frame, first + 1) == frame
        assert log_since(frame, len(data) + 1) == encode_log(len(data) + 1, [])
        with pytest.raises(WireError, match="the model here is at"):
            follow_log(frame, held[first + 1], RECIPE.movement)


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


def never():
    raise AssertionError("no snapshot is wanted here")


@pytest.mark.parametrize("cut", range(0, 50, 5))
def test_damaged_merged_entries_are_refused(cut):
    start = np.linspace(-1, 1, FEW, dtype=np.float32)
    held, entries = played(start, [2.0**-6] * 6)
    frame = merged(held, written(held, entries), 0)
    with pytest.raises(WireError):
        follow_log(frame[:cut], held[0], RECIPE.movement)
    random = np.random.default_rng(cut)
    for _ in range(100):
        body = bytearray(frame[:-4])
        body[random.integers(len(body))] = random.integers(256)
        with contextlib.suppress(WireError):  # who reads what was never written finds out by digest
            follow_log(sealed(bytes(body)), held[0], RECIPE.movement)
    with pytest.raises(WireError, match="merged that move a velocity"):
        follow_log(frame, Public.first(make_recipe("lean"), start), RECIPE.movement)


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
        found = follow_log(frame, held[0], RECIPE.movement)
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
