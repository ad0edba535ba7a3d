"""Our own strategy with ordinary Flower clients, and what they hold on disk and in memory."""

import json
import logging
import math
import random
import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.server import strategy as legacy
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.supercore.task_identity import TaskIdentity

from aqg import make_recipe
from aqg.channel.settings import Settings
from aqg.channel.stepping import SteppingChannel, Travel
from aqg.channel.tensors import Kind
from aqg.core.downlink import Condensed, Exact, Full
from aqg.core.server import Step
from aqg.errors import ConfigError, MessageError, RunError
from aqg.flower import AQG, Buffered, Compressed, FlowerTask, aqg_mod, make_client_app, make_mod
from aqg.flower.envelope import (
    RECORD,
    Envelope,
    array_of,
    record_of,
    tensor_of,
)
from aqg.protocol import ClientSession, ServerSession
from aqg.protocol.messages import Reply
from aqg.protocol.store import DirectoryVault

from tests.flower.federation import Federation
from tests.flower.own_messages import ANY, Saved, parts_of
from tests.flower.small_app import (
    FROZEN,
    NUM_CLIENTS,
    SIZES,
    TARGETS,
    app_answering,
    distance,
    everyone,
    first_arrays,
    make_app,
)
from tests.flower.test_dropin import FLOOR, make_grid
from tests.problems import soak

OPTIONS = {"round_timeout": 60.0, "start_timeout": 5.0, "step": "fixed"}


def make_strategy(**options):
    return AQG(**{"num_clients": NUM_CLIENTS, **OPTIONS, **options})


def run(path, grid, rounds, **options):
    """Run in a directory, or go on there."""
    strategy = make_strategy(run_dir=str(path / "run"), **options)
    return strategy.start(grid, first_arrays(), num_rounds=rounds)


def values_of(record):
    return {name: array.numpy() for name, array in record.items()}


@pytest.mark.parametrize("downlink", ["full", "exact", "condensed"])
def test_without_compression_it_is_federated_averaging(downlink):
    fedavg = FedAvg(**everyone(fraction_evaluate=0.0))
    stock = fedavg.start(make_grid(make_app([])), first_arrays(), num_rounds=3)
    strategy = make_strategy(recipe="gd", downlink=downlink)
    result = strategy.start(make_grid(), first_arrays(), num_rounds=3)
    assert not any(strategy.results["deployment"]["incidents"].values())
    assert list(result.arrays) == list(stock.arrays)
    tolerances = {"full": 1e-5, "exact": 1e-5, "condensed": 0.3}
    for name, array in values_of(stock.arrays).items():
        found = result.arrays[name].numpy()
        if name == "bn.num_batches_tracked":
            assert found == 6
            continue
        assert found.dtype == array.dtype
        rounding = 2**-9 if "running" in name else tolerances[downlink]
        np.testing.assert_allclose(found, array, rtol=1e-6, atol=rounding, err_msg=name)
    assert result.train_metrics_clientapp.keys() == stock.train_metrics_clientapp.keys()
    first = result.train_metrics_clientapp[1]
    assert first["loss"] == pytest.approx(stock.train_metrics_clientapp[1]["loss"], rel=1e-5)


def test_one_client_app_serves_both_servers_and_skips(tmp_path):
    grid = make_grid()
    wrapped = Compressed(FedAvg(**everyone()))
    assert distance(wrapped.start(grid, first_arrays(), num_rounds=4).arrays) < FLOOR
    result = run(tmp_path, grid, 12, recipe="lean")
    assert distance(result.arrays) < 0.8
    np.testing.assert_array_equal(result.arrays["layer.frozen"].numpy(), FROZEN)
    rows = rows_of(tmp_path)
    assert not any(row.get("incidents") for row in rows)
    assert any(0 in row["widths"] for row in rows)  # some had nothing to say
    assert len(rows) == 12
    assert rows[0]["download_bytes"] > 4 * 4 * FROZEN.size > 20 * rows[-1]["download_bytes"]
    traffic = result.traffic
    assert sum(row["upload_bytes"] for row in rows) == traffic.train.up
    assert sum(row["download_bytes"] for row in rows) == traffic.train.down
    assert traffic.nodes.keys() == grid.node_configs.keys()
    assert traffic.evaluate.up > 0


def rows_of(path):
    text = (path / "run" / "rounds.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_what_handlers_and_functions_are_told():
    seen, evaluated = [], []

    def evaluate(number, arrays):
        evaluated.append((number, distance(arrays)))
        return MetricRecord({"distance": evaluated[-1][1]})

    grid = make_grid(make_app([aqg_mod], seen=seen))
    options = {"train_config": ConfigRecord({"lr": 0.5}), "evaluate_fn": evaluate}
    strategy = make_strategy(client_eval_every=2)
    result = strategy.start(grid, first_arrays(), num_rounds=5, **options)
    assert [number for number, _ in evaluated] == [0, 1, 2, 3, 4, 5]
    assert {config["server-round"] for _, config, _ in seen} == {1, 2, 3, 4, 5}
    assert {config["lr"] for _, config, _ in seen} == {0.5}
    assert all(names == ["arrays", "config"] for _, _, names in seen)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 5]
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2, 3, 4, 5]
    for number in (2, 4, 5):  # clients and server measured the same model
        on_clients = result.evaluate_metrics_clientapp[number]["distance"]
        assert on_clients == pytest.approx(evaluated[number][1], rel=1e-6)
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]


def own_app(reply_with):
    return app_answering(lambda m, context: reply_with(m, int(context.node_config["partition-id"])))


def trained(message, client, **metrics):
    values = {name: array.numpy() for name, array in message.content["arrays"].items()}
    values["layer.weight"] = values["layer.weight"] * 0.5 + TARGETS[client] * 0.5
    arrays = ArrayRecord({name: Array(np.asarray(v)) for name, v in values.items()})
    metrics = {"num-examples": int(SIZES[client]), **metrics}
    return RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})


def test_any_metrics_are_averaged_by_examples_and_nan_is_refused(tmp_path, caplog):
    def answer(message, client):
        number = int(message.content["config"]["server-round"])
        own = {"own": 1.0} if client == 3 else {}
        score = math.nan if (client, number) == (1, 2) else float(client)
        return trained(message, client, train_loss=0.25, score=score, curve=[1.0, 2.0], **own)

    with caplog.at_level(logging.INFO, logger="flwr.aqg"):
        result = run(tmp_path, make_grid(own_app(answer)), 3)
    first, second, third = rows_of(tmp_path)
    expected = float(np.average(np.arange(4.0), weights=SIZES))
    assert first["train_score"] == third["train_score"] == pytest.approx(expected)
    assert first["loss"] == first["train_loss"] == 0.25
    assert first["train_own"] == 1.0
    (incident,) = second["incidents"]  # what is no number is refused, and all else with it
    assert (incident["kind"], incident["client"]) == ("rejected", 1)
    assert "'score' of its record 'metrics' is nan" in incident["text"]
    assert second["widths"][1] == -1
    others = np.average([0.0, 2.0, 3.0], weights=SIZES[[0, 2, 3]])
    assert result.train_metrics_clientapp[2]["score"] == pytest.approx(others)
    assert "train_score 2" in caplog.text
    assert caplog.text.count("metric 'curve' is a list") == 1
    # The app has no handler for evaluation: the last loss of training is the final one.
    assert result.evaluate_metrics_clientapp == {}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_loss"] == 0.25


def test_a_report_shows_the_clients_metrics(tmp_path):
    from aqg.report.runs import read_run

    run(tmp_path, make_grid(), 3, recipe="lean", client_eval_every=1)
    found = read_run(tmp_path / "run", "run")
    assert np.isfinite(found.extras["train_start"]).all()
    assert np.isnan(found.extras["eval_distance"][0])  # nobody evaluates before the first round
    assert found.summary is not None
    assert np.isfinite(found.extras["eval_distance"][1:]).all()
    assert found.summary["eval_distance"] >= 0
    again = run(tmp_path, make_grid(), 5, recipe="lean")
    assert sorted(again.train_metrics_clientapp) == [4, 5]  # of this start; others are on disk
    assert len(rows_of(tmp_path)) == 5


@pytest.mark.parametrize("monitor", ["train_score", "eval_distance"])
def test_a_run_can_end_by_the_clients_metrics(tmp_path, monitor):
    def answer(message, client):
        number = int(message.content["config"]["server-round"])
        return trained(message, client, score=float(min(number, 3)))

    app = make_app([aqg_mod]) if monitor.startswith("eval") else own_app(answer)
    options = {"recipe": "lean", "patience": 2, "monitor": monitor, "client_eval_every": 1}
    run(tmp_path, make_grid(app), 12, **options)
    values = [row[monitor] for row in rows_of(tmp_path) if monitor in row]
    assert len(rows_of(tmp_path)) < 12
    assert max(values[-2:]) <= max(values[:-2])  # a score, though the distance is better lower
    assert all(value > max(values[:i]) for i, value in enumerate(values[1:-2], 1))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda content: content.pop("arrays"), "has 0 ArrayRecords"),
        (lambda content: content.update(more=first_arrays()), "has 2 ArrayRecords"),
        (lambda content: content["metrics"].pop("num-examples"), "num-examples 0"),
        (
            lambda content: content["arrays"].update({"layer.weight": Array(np.zeros(2))}),
            "array 'layer.weight' is (2,) float64; the model has (30, 10) float32",
        ),
        (lambda content: content["arrays"].pop("layer.weight"), "no 'layer.weight'"),
    ],
)
def test_a_reply_that_will_not_do_is_refused_with_the_node(tmp_path, spoil, complaint):
    def answer(message, client):
        content = trained(message, client)
        if client == 2:
            spoil(content)
        return content

    run(tmp_path, make_grid(own_app(answer)), 2, max_share=1.0)
    for row in rows_of(tmp_path):
        (incident,) = row["incidents"]
        assert (incident["client"], incident["node"]) == (2, 102)
        assert incident["kind"] in ("error", "rejected")
        assert complaint in incident["text"]


@pytest.mark.parametrize("weighting", ["samples", "equal"])
def test_a_client_without_the_mod_is_told_apart(tmp_path, caplog, weighting):
    strategy = make_strategy(max_failed_rounds=0, start_timeout=0.2, weighting=weighting)
    with pytest.raises(RunError, match="1 rounds in a row"):
        strategy.start(make_grid(make_app([])), first_arrays(), num_rounds=2)
    assert "write ClientApp(mods=[aqg_mod]) in its app" in caplog.text


class Mine(legacy.FedTrimmedAvg):
    pass


def begin(given=None, **options):
    start = {"initial_arrays": first_arrays()} | (given or {})
    make_strategy(**options).start(make_grid(), **start)


def serve(path, **config):
    Federation(path, **config).run()


def clipped(strategy):
    return flower.DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 1.0, NUM_CLIENTS)


LOCAL = {"memory": "none", "statistics": "local"}
OTHER_DOWNLINK = r"here it is 'condensed'.*ratio=1\.0, bits=6,[^;]*$"
REFUSED = [
    (lambda _: Compressed("FedAvg"), "strategy is a str; it must be a Strategy"),
    (lambda _: Compressed(legacy.FedAvg()), r"use flwr\.serverapp\.strategy\.FedAvg$"),
    (lambda _: Compressed(Mine()), r"use flwr\.serverapp\.strategy\.FedTrimmedAvg$"),
    (lambda _: Compressed(FedAvg(), recipe="corse"), "defaults are auto, .* lean, .* also .*stc"),
    (lambda _: Compressed(FedAvg(), recipe="auto:keep=0.1"), "no option 'keep'; it has: share"),
    (lambda _: Compressed(FedAvg(), recipe="auto:noise=nan"), "noise is nan; it must be above 0"),
    *(
        (lambda _, name=name: Compressed(FedAvg(), downlink=name), OTHER_DOWNLINK)
        for name in ("none", "exact", "full")
    ),
    (lambda _: clipped(Compressed(FedAvg())).start(make_grid(), first_arrays()), "outermost"),
    (lambda _: Compressed(make_strategy()).start(make_grid(), first_arrays()), "AQG compresses"),
    (lambda _: Strategy.start(make_strategy(), make_grid(), first_arrays()), "call its start"),
    *(
        (lambda _, inner=inner: Buffered(inner, size=2), r"(AQG|Compressed), .* Compressed\(Buf")
        for inner in (Compressed(FedAvg()), AQG(NUM_CLIENTS))
    ),
    (lambda _: Buffered(FedAvg(), size=0), "size is 0; it must be a whole number above 0"),
    (lambda _: Buffered("FedAvg", size=2), "strategy is a str; it must be a Strategy"),
    (lambda _: make_strategy(memory="none", recipe="lean"), "'none' with a recipe whose clients"),
    (lambda _: Compressed(FedAvg(), memory="none", recipe="lean"), "'none' with a recipe whose"),
    (lambda _: begin(**LOCAL), "statistics that clients keep to themselves"),
    (lambda _: begin(patiense=3), "AQG has no setting 'patiense'; 'patience'"),
    (lambda _: begin(recipe="magic"), "unknown recipe 'magic'"),
    (lambda _: begin({"num_rounds": 0}), "rounds is 0; it must be at least 1"),
    (lambda _: begin(include="lora"), "include pattern 'lora' matches none of the 2 tensors"),
    (lambda _: begin({"initial_arrays": [1.0]}), "the model to start from is a list"),
    (lambda _: begin({"initial_arrays": FedAvg()}), "a strategy, FedAvg: to keep that"),
    (lambda _: begin({"evaluate_fn": lambda *_: None}, evaluate=lambda _: 1.0), "give one of them"),
    (lambda path: serve(path, rounds=0), "num-server-rounds is 0; it must be at least 1"),
    (lambda path: serve(path, rounds="many"), "num-server-rounds is 'many'; it must be a whole"),
    (lambda path: serve(path, rounds=True), "num-server-rounds is True; it must be a whole number"),
    (lambda path: serve(path, min_clients=4), "min-clients is 4; it must be at most 3"),
    (lambda path: serve(path, min_clients=2, participation=0.34), "only 1 of 3 clients are"),
    (lambda path: serve(path, recipe="magic"), "unknown recipe 'magic'"),
    (lambda path: serve(path, optimizer="magic"), "unknown optimizer 'magic'"),
    (lambda path: serve(path, weighting="age"), "unknown weighting 'age'"),
    (lambda path: serve(path, round_timeout=0.0), "round-timeout is 0.0; it must be above 0"),
    (lambda path: serve(path, tensorboard=True, run_dir=""), "run-dir is empty"),
    (lambda path: serve(path, trust_partition_id="yes"), "it must be true or false"),
    (lambda path: serve(path, metrics_every=-1), "metrics-every is -1; it must be at least 0"),
    (lambda path: serve(path, max_bytes=-1), "max-bytes is -1; it must be at least 0"),
    (lambda path: serve(path, patience=-1), "patience is -1; it must be at least 0"),
]


@pytest.mark.parametrize(("make", "complaint"), REFUSED)
def test_what_cannot_be_is_named(tmp_path, make, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make(tmp_path)


def test_tasks_send_metrics_as_well(tmp_path):
    from aqg.flower import FlowerTask, make_client_app

    def make_task(context):
        client = int(context.node_config["partition-id"])

        def train(net, number):
            with torch.no_grad():
                net.weight += 0.1
            return {"loss": 0.5, "rate": 1.0 / number, "client": client}

        def evaluate(net):
            return {"loss": 0.25, "mean": float(net.weight.detach().mean())}

        return FlowerTask.from_training(make_net(), train, int(SIZES[client]), evaluate)

    def make_net():
        torch.manual_seed(0)
        return torch.nn.Linear(3, 1)

    measured = []

    def evaluate(net):
        assert not net.training
        measured.append(float(net.weight.detach().mean()))
        return {"mean": measured[-1], "broken": math.nan}

    grid = make_grid(make_client_app(make_task))
    strategy = make_strategy(recipe="gd", run_dir=str(tmp_path / "run"), evaluate=evaluate)
    result = strategy.start(grid, make_net(), num_rounds=3)
    rows = rows_of(tmp_path)
    assert [row["train_rate"] for row in rows] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert rows[0]["train_client"] == pytest.approx(np.average(np.arange(4), weights=SIZES))
    assert [row["eval_mean"] for row in rows] == pytest.approx(measured[:3], rel=1e-5)
    assert [row["test_mean"] for row in rows] == measured[:3]
    assert [row["test_broken"] for row in rows] == [None] * 3
    assert {row["loss"] for row in rows} == {0.25}
    assert sorted(result.evaluate_metrics_clientapp) == [0, 1, 2, 3]
    assert isinstance(strategy.final, torch.nn.Linear)
    assert strategy.results["eval_mean"] == pytest.approx(measured[3], rel=1e-5)


def test_a_module_with_tied_weights_serves_plain_clients():
    from tests.modules import Masked

    seen = []

    def answer(message, _context):
        net = Masked()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        seen.append(net.first.weight.detach().clone())
        with torch.no_grad():
            net.first.weight += 1.0
        metrics = MetricRecord({"num-examples": 1})
        return {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}

    start = Masked().first.weight.detach().clone()
    grid, strategy = make_grid(app_answering(answer)), make_strategy(recipe="gd")
    result = strategy.start(grid, Masked(), num_rounds=2)
    assert list(result.arrays) == list(Masked().state_dict())
    for name in ("first.weight", "second.weight"):
        np.testing.assert_allclose(result.arrays[name].numpy(), start + 2.0, atol=1e-5)
    np.testing.assert_allclose(seen[-1], start + 1.0, atol=1e-5)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.soak) for s in (1, 2))])
@pytest.mark.parametrize("downlink", ["exact", "condensed"])
def test_after_any_faults_both_sides_agree_again(tmp_path, seed, downlink):
    """Orders and replies are lost, states wiped and restored; then two rounds go well."""
    rng = np.random.default_rng(seed)
    grid = make_grid()
    grid.keeps_memories = True
    state = tmp_path / "state"
    rounds, faulty = 12, 9

    def trouble(node, message):
        number = int(message.metadata.group_id or 0)
        if not 0 < number <= faulty:
            return message
        own, copy = state / f"partition-{node - 100}", tmp_path / f"copy-{node}"
        match rng.integers(12):
            case 0:
                return None
            case 1:
                shutil.rmtree(own, ignore_errors=True)
            case 2 if own.exists() and not copy.exists():
                shutil.copytree(own, copy)
            case 3 if copy.exists():
                shutil.rmtree(own, ignore_errors=True)
                shutil.copytree(copy, own)
            case 4:
                for path in own.glob("*/state.json"):
                    path.write_text("{")
        return message

    def lose(node, reply):
        number = int(reply.metadata.group_id or 0)
        return None if 0 < number <= faulty and rng.random() < 0.15 else reply

    grid.deliver, grid.answer = trouble, lose
    options = {"include": "*.weight", "round_timeout": 0.1, "downlink": downlink}
    result = run(tmp_path, grid, rounds, recipe="qgd", **options)
    np.testing.assert_array_equal(result.arrays["layer.frozen"].numpy(), FROZEN)
    rows = rows_of(tmp_path)
    assert sum(len(row.get("incidents", [])) for row in rows[:faulty]) > 5
    assert not rows[-1].get("incidents")
    saved = Saved(tmp_path / "run", make_recipe("qgd"), downlink)
    assert len(saved.book.parameters) == 300
    for client in range(NUM_CLIENTS):
        assert saved.agrees(client, state / f"partition-{client}")


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
    [soak(Full(), 6.9), soak(Exact(), 8.1), (Condensed(), 7.5)],
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
            content[RECORD] = envelope.pack()
            message = Message(RecordDict(content), NODE, "train", ttl=60.0)
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


TENSORS = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.asfortranarray(np.arange(12, dtype=np.float64).reshape(3, 4)),
    np.arange(24, dtype=np.int64).reshape(2, 3, 4)[:, ::2],
    np.array(3.5, np.float16),
    np.zeros((0, 3), np.float32),
    np.array([True, False]),
    np.arange(3, dtype=">f4"),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}{t.shape}")
def test_arrays_are_flowers(tensor):
    read = tensor_of(Array(tensor))
    assert read.dtype == tensor.dtype
    assert read.shape == tensor.shape
    assert np.array_equal(read, tensor)
    plain = np.array(tensor, order="C")
    assert array_of(tensor).data == Array(plain).data
    assert np.array_equal(array_of(tensor).numpy(), tensor)


def test_no_copy_is_made_and_damaged_arrays_are_refused():
    array = Array(np.zeros(1000, np.float32))
    read = tensor_of(array)
    assert np.shares_memory(read, np.frombuffer(array.data, np.uint8))
    assert not read.flags.writeable

    whole = Array(np.zeros(1000, np.float32))
    cut = Array("float32", (1000,), "numpy.ndarray", whole.data[:-8])
    with pytest.raises(ValueError, match="buffer is smaller"):
        tensor_of(cut)
    with pytest.raises(MessageError, match="an array is 'pickle'"):
        tensor_of(Array("float32", (1000,), "pickle", whole.data))
