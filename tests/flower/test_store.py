"""What a client holds on disk, and in memory while it answers."""

import random
import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from aqg.channel.settings import Settings
from aqg.channel.stepping import SteppingChannel, Travel
from aqg.channel.tensors import Kind
from aqg.core.downlink import Condensed, Exact, Full
from aqg.core.server import Step
from aqg.errors import ConfigError, RunError
from aqg.flower import AQG, Compressed, FlowerTask, make_client_app, make_mod
from aqg.flower.envelope import RECORD, Envelope, record_of
from aqg.protocol import ClientSession, ServerSession
from aqg.protocol.messages import Reply
from aqg.protocol.store import DirectoryVault

from tests.flower.own_messages import ANY, parts_of
from tests.flower.small_app import NUM_CLIENTS, everyone, first_arrays, make_app
from tests.flower.test_dropin import make_grid

LINK, NODE = 1, 5


def train(params, _, key):
    gradient = np.random.default_rng(key).standard_normal(len(params), np.float32)
    gradient += params
    return 0.0, gradient


def test_a_crash_after_a_rollback_leaves_the_memory_as_it_was(tmp_path, monkeypatch):
    """What was written before the index is of no account, and takes no place of what counts."""

    def crash(_vault, _text):
        raise RunError("the power fails")

    def train_at(model, number):
        return np.random.default_rng(number).standard_normal(len(model)) + model

    server = ServerSession(np.zeros(5000), num_clients=1, recipe="lean")
    client = ClientSession(tmp_path / "one")
    server.take(0, client.answer(server.order(0), train_at))
    server.step()
    client.answer(server.order(0), train_at)  # is lost: the next order takes it back
    server.step()
    order = server.order(0)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryVault, "write_index", crash)
        with pytest.raises(RunError, match="the power fails"):
            ClientSession(tmp_path / "one").answer(order, train_at)
    answers = (ClientSession(tmp_path / n).answer(order, train_at) for n in ("one", "other"))
    reply, other = (replace(Reply.from_bytes(a, ANY), work_seconds=0.0) for a in answers)
    assert reply == other
    assert reply.rolled_back
    vectors = [sum(1 for _ in (tmp_path / n).rglob("vector-*.npz")) for n in ("one", "other")]
    assert vectors[0] == vectors[1], "what the crash left is gone"


@pytest.mark.parametrize(
    ("downlink", "most_vectors"),
    [
        *(
            pytest.param(d, most, marks=pytest.mark.soak)
            for d, most in [(Full(), 6.9), (Exact(), 8.1)]
        ),
        (Condensed(), 7.5),
    ],
)
def test_a_client_holds_few_vectors_of_a_large_model(tmp_path, downlink, most_vectors):
    length = 1_200_000  # beyond the context coder, which needs memory of its own
    app = make_client_app(lambda _: FlowerTask(train, num_samples=1))
    context = Context(1, NODE, {"aqg-state-dir": str(tmp_path)}, RecordDict(), {})
    members, step = (1, lambda _: 0), Step(0.1, downlink=downlink)
    start = {"parameters": np.zeros(length, np.float32)}
    travel = Travel({"parameters": Kind.VECTOR})
    channel = SteppingChannel("p1", start, Settings(recipe="lean"), members, step, travel)
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, LINK
    for number in range(3):
        tracemalloc.start()
        try:
            phase = channel.publish({}, is_train=True)
            part, is_full = channel.order(NODE, evaluate=False)
            envelope, content = Envelope(), {}
            envelope.add("arrays", Envelope.FULL if is_full else Envelope.COMPRESSED, part)
            if is_full:
                content["arrays"] = record_of(channel.copied().items())
            message = Message(
                RecordDict({**content, RECORD: envelope.pack()}), NODE, "train", ttl=60.0
            )
            message.metadata.__dict__["_message_id"] = str(number)
            del content
            reply = app(message, context)
            peak = tracemalloc.get_traced_memory()[1] / (4 * length)
        finally:
            tracemalloc.stop()
        channel.take(NODE, phase, parts_of(reply)[0]).commit()
        channel.step({0}, is_step=True)
    # The model in the message, the mirror and its direction, the gradient, what is sent of it,
    # its levels, and the next mirror and direction; not all at a time.
    # With a log, the public model before and after an entry comes first, and makes room then.
    assert peak < most_vectors


def own_strategy(**options):
    fixed = {"round_timeout": 5.0, "start_timeout": 5.0, "participation": 0.5}
    return AQG(NUM_CLIENTS, client_eval_every=1, **fixed, **options)


def wrapped_strategy(**options):
    return Compressed(FedAvg(**everyone()), **options)


@pytest.mark.parametrize("start", ["seed", "exact"])
@pytest.mark.parametrize("make", [own_strategy, wrapped_strategy])
def test_nodes_that_hold_nothing_train_the_same_model(tmp_path, make, start):
    models = []
    for memory in ("model", "none"):
        directory = tmp_path / memory
        grid = make_grid(make_app([make_mod(directory)]))
        grid.keeps_memories = True
        random.seed(1)  # FedAvg asks nodes in a random order
        result = make(memory=memory, start=start).start(grid, first_arrays(), num_rounds=5)
        models.append({name: array.numpy() for name, array in result.arrays.items()})
        assert directory.exists() == (memory == "model")
        assert not any(context.state for context in grid.contexts.values())
    for name, tensor in models[0].items():
        np.testing.assert_array_equal(models[1][name], tensor)


def test_nothing_is_held_in_a_context_either(monkeypatch):
    monkeypatch.setenv("AQG_STATE_DIR", "context")
    for memory in ("model", "none"):
        grid = make_grid()
        wrapped_strategy(memory=memory).start(grid, first_arrays(), num_rounds=2)
        assert any(context.state for context in grid.contexts.values()) == (memory == "model")


def test_recipes_that_need_a_memory_are_refused_without_one():
    for make in (own_strategy, wrapped_strategy):
        with pytest.raises(ConfigError, match="memory is 'none' with a recipe whose clients"):
            make(memory="none", recipe="lean")
    with pytest.raises(ConfigError, match="statistics that clients keep to themselves"):
        own_strategy(memory="none", statistics="local").start(make_grid(), first_arrays())
