"""The channel without a framework: arrays and bytes, as an adapter for any framework uses it."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from aqg.channel.client import CopyStore, OutOfReachError, receive, reply_to
from aqg.channel.server import Channel, LostError
from aqg.channel.settings import Settings
from aqg.errors import AqgError, ConfigError, MessageError
from aqg.protocol.follower import CONTENT_EVERY
from aqg.protocol.messages import order_from_bytes, reply_from_bytes, to_bytes
from aqg.protocol.store import ClientStore, MemoryVault

from tests.problems import SOME_RECIPES

RNG = np.random.default_rng(0)
TARGET = RNG.standard_normal((40, 50)).astype(np.float32)
FIRST = {
    "w": np.zeros((40, 50), np.float32),
    "frozen": np.arange(6, dtype=np.float32),
    "bn.running_mean": np.zeros(3, np.float32),
    "count": np.zeros((), np.int64),
}


class Notes:
    """A client's memory, in the process."""

    def __init__(self):
        self.vaults = {}

    def terms(self):
        found = [self.copies(run).terms() for run in list(self.vaults) if "-" not in run]
        return [terms for terms in found if terms is not None]

    def copies(self, run):
        return CopyStore(self.vaults.setdefault(run, MemoryVault()), run)

    def mirrors(self, run, fingerprint, layout):
        key = f"{run}-{fingerprint.hex()}-{layout.hex()}"
        return ClientStore(self.vaults.setdefault(key, MemoryVault()), key)


def train(values, rate=0.5, **changes):
    """Go half of the way to the target."""
    trained = dict(values) | {"w": values["w"] + rate * (TARGET - values["w"])}
    return trained | {"bn.running_mean": np.full(3, 0.5, np.float32)} | changes


def deliver(channel, phase, node, notes, evaluate=False):
    """Send a node its order, and the whole model where it needs it."""
    order, is_full = channel.order(node, evaluate)
    whole = dict(channel.copied()) if is_full else None
    return receive(order, whole, notes)


def play(channel, nodes, rounds, model=FIRST, change=lambda part: part):
    """Train and take the mean, as a strategy does."""
    for _ in range(rounds):
        phase, shown = channel.publish(model, is_train=True), []
        for node, notes in nodes.items():
            held = deliver(channel, phase, node, notes)
            taken = channel.take(node, phase, change(reply_to(held, train(held.values), notes)))
            shown.append(dict(taken.tensors()))
            taken.commit()
        model = {name: np.mean([s[name] for s in shown], axis=0) for name in model}
    return model


@pytest.mark.parametrize("recipe", SOME_RECIPES)
def test_every_recipe_that_is_offered_works(recipe):
    channel = Channel("run", FIRST, Settings(recipe=recipe))
    model = play(channel, {node: Notes() for node in range(3)}, 12)
    assert np.isfinite(model["w"]).all()
    assert np.vdot(model["w"], TARGET) > 0.1 * np.vdot(TARGET, TARGET)
    assert np.array_equal(model["frozen"], FIRST["frozen"])
    assert np.allclose(model["bn.running_mean"], 0.5)


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
    stamp = channel._peers[0][1].entry.stamp
    assert reply_from_bytes(reply, stamp).frame == b""
    with pytest.raises(MessageError, match=f"'{name}' holds NaN or infinity after training"):
        channel.take(0, phase, reply)
    good = reply_from_bytes(reply_to(held, train(held.values), notes), stamp)
    length = channel.schema.bitmap_bytes
    place = channel.schema.places["frozen"]
    kept = bytes([0, 1, place]) + np.full(6, value, "<f4").tobytes()
    layout = phase.copy.layout
    assert len(layout) == length
    forged = to_bytes(replace(good, statistics=layout + kept))
    with pytest.raises(MessageError, match="tensor 'frozen' holds NaN or infinity"):
        channel.take(0, phase, forged)
    play(channel, {0: notes}, 1, model)


def test_models_that_cannot_be_sent():
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
    with pytest.raises(ConfigError, match="none of the 1 arrays"):
        Channel("run", {"trees": np.zeros(5, np.uint8)}, Settings())
    with pytest.raises(ConfigError, match="no tensor holds finite numbers"):
        Channel("run", {"w": np.full(5, np.nan)}, Settings())
    with pytest.raises(ConfigError, match=r"include pattern 'x\*' matches none"):
        Channel("run", FIRST, Settings(include=("x*",)))


def test_an_update_beyond_half_precision():
    first = {"w": np.full(100, 60_000, np.float16)}
    channel, notes = Channel("run", first, Settings(recipe="gd")), Notes()
    phase = channel.publish(first, is_train=True)
    held = deliver(channel, phase, 0, notes)
    reply = reply_to(held, {"w": np.full(100, 60_032, np.float16)}, notes)
    higher = phase._replace(values={"w": np.full(100, 65_504, np.float16)})
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
    order = order_from_bytes(channel.order(0, False)[0], notes.terms())
    with pytest.raises(OutOfReachError, match="no model is held"):
        receive(to_bytes(order), None, Notes())
    for cut in range(1, len(order.log)):
        with pytest.raises((OutOfReachError, AqgError)):
            receive(to_bytes(replace(order, log=order.log[:-cut])), None, notes)
    with pytest.raises(OutOfReachError, match="the server says"):
        receive(to_bytes(replace(order, public=bytes(4))), None, notes)
    receive(to_bytes(order), None, notes)


def test_it_needs_no_framework():
    code = (
        "import sys\n"
        "sys.modules['flwr'] = sys.modules['torch'] = None\n"
        "import aqg.channel.client, aqg.channel.server\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
