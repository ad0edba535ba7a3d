"""The channel without a framework: arrays and bytes, as an adapter for any framework uses it."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from aqg.channel.client import Memory, OutOfReachError, receive, reply_to
from aqg.channel.server import Channel, largest_of, measure_change
from aqg.channel.settings import Settings, make_settings
from aqg.channel.tensors import PIECE, Schema, Update, flatten, is_same, shifted
from aqg.core.quantizers import largest
from aqg.errors import AqgError, ConfigError, MessageError
from aqg.protocol.log import CONTENT_EVERY, LostError
from aqg.protocol.messages import Order, Reply
from aqg.protocol.store import MemoryVault
from aqg.wire.entry import MERGED_MARK

from tests.problems import SOME_RECIPES

RNG = np.random.default_rng(0)
TARGET = RNG.standard_normal((40, 50)).astype(np.float32)
FIRST = {"w": np.zeros((40, 50), np.float32), "frozen": np.arange(6, dtype=np.float32)}
FIRST |= {"bn.running_mean": np.zeros(3, np.float32), "count": np.zeros((), np.int64)}


class Notes(Memory):
    """A client's memory, in the process."""

    def __init__(self):
        self.vaults = {}

    def runs(self):
        return [run for run in self.vaults if "-" not in run]

    def vault(self, run, name):
        return self.vaults.setdefault(name, MemoryVault())


def train(values, rate=0.5, **changes):
    """Go half of the way to the target."""
    trained = dict(values) | {"w": values["w"] + rate * (TARGET - values["w"])}
    return trained | {"bn.running_mean": np.full(3, 0.5, np.float32)} | changes


def deliver(channel, phase, node, notes, evaluate=False):
    """Send a node its order, and the whole model where it needs it."""
    order, is_full = channel.order(node, evaluate)
    whole = dict(channel.copied()) if is_full else None
    return receive(order, whole, notes)


def play(channel, nodes, rounds, model=FIRST, train=train):
    """Train and take the mean, as a strategy does."""
    for _ in range(rounds):
        phase, shown = channel.publish(model, is_train=True), []
        for node, notes in nodes.items():
            held = deliver(channel, phase, node, notes)
            taken = channel.take(node, phase, reply_to(held, train(held.values), notes))
            shown.append(dict(taken.tensors()))
            taken.commit()
        model = {name: np.mean([s[name] for s in shown], axis=0) for name in model}
    return model


@pytest.mark.parametrize("recipe", SOME_RECIPES)
def test_every_recipe_that_is_offered_works(recipe):
    channel = Channel("run", FIRST, Settings(recipe=recipe))
    go = partial(train, rate=0.05 if recipe == "dgc" else 0.5)  # momentum makes ten steps of one
    model = play(channel, {node: Notes() for node in range(3)}, 12, train=go)
    assert np.isfinite(model["w"]).all()
    assert np.vdot(model["w"], TARGET) > 0.1 * np.vdot(TARGET, TARGET)
    assert np.array_equal(model["frozen"], FIRST["frozen"])
    assert np.allclose(model["bn.running_mean"], 0.5)


def test_nodes_are_told_how_much_noise_a_reply_may_carry():
    """It follows from how much the replies of the round before agreed."""
    channel, nodes = Channel("run", FIRST, make_settings("auto")), {0: Notes(), 1: Notes()}
    told = []
    model = FIRST
    for _ in range(3):
        model = play(channel, nodes, 1, model)
        told.append(Order.from_bytes(channel.order(0, False)[0], nodes[0].terms()).noise)
    assert min(told) > 0
    assert len(set(told)) > 1


def test_reading_changes_nothing_until_it_is_committed():
    channel, notes = Channel("run", FIRST, Settings(recipe="lean")), Notes()
    model = play(channel, {0: notes}, 2)
    phase = channel.publish(model, is_train=True)
    held = deliver(channel, phase, 0, notes)
    part = reply_to(held, train(held.values, 0.9), notes)
    order = channel.order(0, False)
    first, again = (channel.take(0, phase, part) for _ in range(2))
    assert channel.order(0, False) == order
    for (name, one), (other_name, other) in zip(first.tensors(), again.tensors(), strict=True):
        assert name == other_name
        assert np.array_equal(one, other)
    first.commit()
    with pytest.raises(AqgError, match="written with another reference"):
        channel.take(0, phase, part)


@pytest.mark.parametrize("name", ["w", "frozen", "bn.running_mean"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_no_number_stays_where_it_is(name, value):
    """A client says so, and a forged reply is refused."""
    channel, notes = Channel("run", FIRST, Settings(recipe="lean")), Notes()
    model = play(channel, {0: notes}, 2)
    phase = channel.publish(model, is_train=True)
    held = deliver(channel, phase, 0, notes)
    bad = held.values[name].copy()
    bad.reshape(-1)[-1] = value
    reply = reply_to(held, train(held.values, **{name: bad}), notes)
    stamp = channel._peers[0][1].held.stamp
    assert Reply.from_bytes(reply, stamp).frame == b""
    with pytest.raises(MessageError, match=f"'{name}' holds NaN or infinity after training"):
        channel.take(0, phase, reply)
    good = Reply.from_bytes(reply_to(held, train(held.values), notes), stamp)
    length = channel.schema.bitmap_bytes
    place = channel.schema.places["frozen"]
    kept = bytes([0, 1, place]) + np.full(6, value, "<f4").tobytes()
    layout = phase.copy.layout
    assert len(layout) == length
    forged = replace(good, statistics=layout + kept).to_bytes()
    with pytest.raises(MessageError, match="tensor 'frozen' holds NaN or infinity"):
        channel.take(0, phase, forged)
    play(channel, {0: notes}, 1, model)


def test_models_that_cannot_be_sent_and_updates_beyond_half_precision():
    channel, notes = Channel("run", FIRST, Settings(recipe="lean")), Notes()
    model = play(channel, {0: notes}, 3)
    channel.publish(model, is_train=False)
    bad = model | {"bn.running_mean": np.array([0, np.nan, 0], np.float32)}
    phase = channel.publish(bad, is_train=True)
    assert channel.fault == "tensor 'bn.running_mean' holds NaN or infinity"
    held = deliver(channel, phase, 0, notes)
    assert all(np.isfinite(tensor).all() for tensor in held.values.values())
    assert np.array_equal(phase.values["w"], model["w"])
    channel.publish(model, is_train=True)
    assert not channel.fault
    with pytest.raises(ConfigError, match="leave 0 of the 0 trainable parameters"):
        Channel("run", {"trees": np.zeros(5, np.uint8)}, Settings())
    with pytest.raises(ConfigError, match="no tensor holds finite numbers"):
        Channel("run", {"w": np.full(5, np.nan)}, Settings())
    with pytest.raises(ConfigError, match=r"include pattern 'x\*' matches none"):
        Channel("run", FIRST, Settings(include=("x*",)))

    first = {"w": np.full(100, 60_000, np.float16)}
    channel, notes = Channel("run", first, Settings(recipe="gd")), Notes()
    phase = channel.publish(first, is_train=True)
    held = deliver(channel, phase, 0, notes)
    reply = reply_to(held, {"w": np.full(100, 60_032, np.float16)}, notes)
    higher = replace(phase, values={"w": np.full(100, 65_504, np.float16)})
    with pytest.raises(MessageError, match="makes 'w' hold NaN or infinity"):
        list(channel.take(0, higher, reply).tensors())


def test_copies_that_came_apart_are_found_out():
    """Entries alone do not show it; the whole copy is looked at from time to time."""
    channel, notes = Channel("run", FIRST, Settings(recipe="lean")), Notes()
    model = play(channel, {0: notes}, 2)
    store = notes.copies("run")
    copy, schema = store.load()
    vector = copy.vector.copy()
    vector[7] += 1.0
    track = copy.public.track._replace(position=vector[None])
    store.save(copy._replace(public=copy.public._replace(track=track)), schema, store.terms())
    with pytest.raises(OutOfReachError) as error:
        play(channel, {0: notes}, CONTENT_EVERY, model)
    with pytest.raises(LostError):
        channel.take(0, channel.publish(model, is_train=False), error.value.reply)
    channel.forget(0)
    model = play(channel, {0: notes}, 4, model)
    assert np.array_equal(notes.copies("run").load()[0].vector, channel._copy.vector)


def test_damaged_memories_and_logs():
    channel, notes = Channel("run", FIRST, Settings(recipe="lean")), Notes()
    model = play(channel, {0: notes}, 2)
    channel.publish(model, is_train=True)
    order = Order.from_bytes(channel.order(0, False)[0], notes.terms())
    with pytest.raises(OutOfReachError, match="no model is held"):
        receive(order.to_bytes(), None, Notes())
    for cut in range(1, len(order.log)):
        with pytest.raises((OutOfReachError, AqgError)):
            receive(replace(order, log=order.log[:-cut]).to_bytes(), None, notes)
    with pytest.raises(OutOfReachError, match="the server says"):
        receive(replace(order, public=bytes(4)).to_bytes(), None, notes)
    receive(order.to_bytes(), None, notes)


def test_what_a_node_missed_comes_as_one_entry():
    channel, nodes = Channel("run", FIRST, make_settings("auto")), {0: Notes(), 1: Notes()}
    model = play(channel, nodes, 3)
    model = play(channel, {0: nodes[0]}, 12, model)
    channel.publish(model, is_train=True)
    data = channel.order(1, False)[0]
    order = Order.from_bytes(data, nodes[1].terms())
    assert order.log[0] == MERGED_MARK
    assert len(order.log) < 0.8 * sum(map(len, channel._log.entries[-12:]))
    receive(data, None, nodes[1])
    held = nodes[1].copies("run").load()[0]
    assert held.vector.tobytes() == channel._copy.vector.tobytes()
    assert held.values(channel.schema)["bn.running_mean"].tolist() == [0.5] * 3
    model = play(channel, {0: nodes[0]}, 3, model)  # its reply was lost, and it is ahead
    held = deliver(channel, channel.publish(model, is_train=True), 1, nodes[1])
    assert held.values["w"].tobytes() == channel.copied()["w"].tobytes()


def test_one_coordinate_that_is_much_larger_than_all_others():
    """A grid that holds it would be too coarse for them."""
    first = {"w": np.zeros((40, 50), np.float32), "scale": np.full(1, 1e6, np.float32)}
    channel = Channel("run", first, make_settings("lean"))

    def train_both(values):
        return {"w": values["w"] + 0.5 * (TARGET - values["w"]), "scale": values["scale"] + 1}

    model = play(channel, {node: Notes() for node in range(2)}, 15, first, train_both)
    assert channel._copy.public.quantum == 0
    assert np.abs(model["w"] - TARGET).max() < 0.1


FRESH = {
    "fc.weight": RNG.uniform(-0.1, 0.1, (40, 100)).astype(np.float32),
    "fc.bias": RNG.uniform(-0.1, 0.1, 40).astype(np.float32),
    "bn.weight": np.ones(40, np.float32),
    "bn.running_var": np.ones(40, np.float32),
    "count": np.zeros((), np.int64),
}


@pytest.mark.parametrize(
    ("start", "most"), [("auto", 300), ("seed", 300), ("rounded", 5000), ("digest", 300)]
)
def test_a_first_model_in_few_bytes(start, most):
    """Nodes hold exactly what the server starts from, whenever they come."""
    channel = Channel("run", FRESH, make_settings("auto", start=start))
    model = dict(channel.copied())
    near = {"auto": 0.3, "seed": 0.3, "rounded": 1e-3, "digest": 0.0}[start]
    assert np.abs(model["fc.weight"] - FRESH["fc.weight"]).max() <= near
    assert abs(model["fc.weight"].std() - FRESH["fc.weight"].std()) < 2e-3
    nodes = {node: Notes() for node in range(3)}
    for number in range(4):
        phase, shown = channel.publish(model, is_train=True), []
        for node in range(1 + (number > 1)):
            order, is_full = channel.order(node, False)
            assert not is_full
            assert len(order) < (most if number == 0 else 8000)
            held = receive(order, None, nodes[node], start=lambda: FRESH)
            assert held.values["fc.weight"].tobytes() == channel.copied()["fc.weight"].tobytes()
            after = {n: t + np.ones_like(t) if t.ndim else t for n, t in held.values.items()}
            taken = channel.take(node, phase, reply_to(held, after, nodes[node]))
            shown.append(dict(taken.tensors()))
            taken.commit()
        model = {name: np.mean([s[name] for s in shown], axis=0) for name in model}
    order, _ = channel.order(2, False)
    if start == "digest":  # it has another model, says so, and gets this one
        with pytest.raises(OutOfReachError, match="another one than that held here"):
            receive(order, None, nodes[2], start=lambda: FRESH | {"fc.bias": FRESH["fc.bias"] + 1})
        channel.forget(2)
        assert channel.order(2, False)[1]
    else:
        with pytest.raises(AqgError):
            receive(order[:-9] + bytes(9), None, nodes[2])


def test_a_model_that_was_trained_is_not_drawn_anew():
    trained = FRESH | {"fc.weight": FRESH["fc.weight"] + np.arange(100, dtype=np.float32) / 500}
    channel = Channel("run", trained, make_settings("auto", start="auto"))
    assert all(np.array_equal(tensor, trained[n]) for n, tensor in channel.copied().items())
    assert channel.order(0, False)[1]


def test_changes_are_measured_piece_by_piece_and_taken_off_in_the_tensors_own_precision():
    one = np.zeros(PIECE + 3, np.float32)
    other = one.copy()
    assert is_same(one, other)
    other[-1] = -0.0
    assert not is_same(one, other)
    rng = np.random.default_rng(0)
    before = rng.standard_normal(PIECE + 1000).astype(np.float32)
    after = before.copy()
    after[::7] += 0.25
    after[1] *= 1 + 2e-7  # rounding
    (spec,) = Schema.of({"w": before}).specs
    square, count = measure_change({"w": after}, {"w": before}, [spec], "float32")
    assert count == len(before[::7])
    assert square == pytest.approx(float(np.square(after.astype(np.float64) - before).sum()))

    values = {"a": np.ones((2, 2), np.float16), "b": np.arange(3, dtype=np.float32)}
    specs = Schema.of(values).specs
    update = np.linspace(0, 0.1, 7).astype(np.float32)
    shown = dict(shifted(values, Update(update, "float32"), specs))
    assert [shown[s.name].dtype.name for s in specs] == ["float16", "float32"]
    difference = flatten(values, specs) - update
    assert np.array_equal(shown["b"], difference[4:])
    assert np.array_equal(shown["a"].reshape(-1), difference[:4].astype(np.float16))


@pytest.mark.parametrize("piece", [100, PIECE])
def test_the_largest_are_found_in_little_memory(piece, monkeypatch):
    monkeypatch.setattr("aqg.channel.tensors.PIECE", piece)
    rng = np.random.default_rng(0)
    for draw in range(60):
        vector = rng.standard_normal(int(rng.integers(2, 2000))).astype(np.float32)
        if draw % 2:  # many are equal, and many are zero
            vector = np.round(2 * vector).astype(np.float32) / 2
        count = int(rng.integers(0, len(vector) + 2))
        assert np.array_equal(largest_of(vector, count), largest(vector, count))
