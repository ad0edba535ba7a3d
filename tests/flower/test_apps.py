"""ServerApp and ClientApp, driven through a grid of real Flower messages in memory."""

import json
import logging
import math
import os
import shutil
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.app.message.message import make_message
from hypothesis import given
from hypothesis import strategies as st

from aqg import make_recipe
from aqg.core.downlink import make_downlink, resolve_downlink
from aqg.core.optimizers import make_optimizer
from aqg.core.step_sizes import Fixed, resolve_step
from aqg.errors import ConfigError, MessageError, RunError, WireError
from aqg.flower import FlowerTask, make_client_app
from aqg.flower.envelope import LARGE_BYTES, Envelope
from aqg.flower.journal import RunLogger
from aqg.protocol.store import write_arrays
from aqg.sim.record import DROPPED
from aqg.sim.training import LocalTraining

from tests.flower.federation import (
    ALPHA,
    DOWNLINKS,
    LOST,
    PROBLEM,
    Federation,
    KilledError,
    Killer,
    at,
    reference,
    round_of,
    samples_of,
    task_of,
)
from tests.flower.own_messages import change_metrics, change_reply
from tests.flower.test_faults import other_task
from tests.problems import crossed, some_recipes

CASES = [
    ("lean", {}, {}),
    ("laq", {"weighting": "samples"}, {"weighting": "samples"}),
    ("qsgd", {"fraction-train": 0.67}, {"participation": 0.67}),
    ("onebit", {"optimizer": "momentum"}, {"optimizer": make_optimizer("momentum")}),
    ("lean", {"optimizer": "adam"}, {"optimizer": make_optimizer("adam")}),
]


@pytest.mark.parametrize(("case", "downlink"), crossed(CASES, DOWNLINKS))
def test_without_faults_the_model_is_the_simulators(tmp_path, case, downlink):
    recipe, config, training = case
    federation = Federation(tmp_path, recipe=recipe, downlink=downlink, **config)
    training = {**training, "downlink": make_downlink(downlink)}
    final = federation.run(evaluate=PROBLEM.test_accuracy, describe={"dataset": "tiny"})
    simulation = reference(recipe, 0, **training)
    records = [simulation.run_round() for _ in range(8)]
    assert np.array_equal(final, simulation.parameters)
    rows = federation.rows()
    assert [row["widths"] for row in rows] == [list(record.widths) for record in records]
    summary = federation.summary
    for name in ("client_upload_bytes", "client_download_bytes"):
        assert summary[name] == np.sum([row[name] for row in rows], axis=0).tolist()
    for row, record in zip(rows, records, strict=True):
        heads = 3 * 700  # what is around frames: the order or reply, its checks, and metrics
        assert record.upload_bytes < row["upload_bytes"] < record.upload_bytes + heads
        assert row["download_bytes"] < record.download_bytes + heads + 3 * 8 * 21
    if "fraction-train" not in config:
        assert [row["loss"] for row in rows] == [record.loss for record in records]
    assert summary["final_loss"] == simulation.loss()
    assert summary["test_accuracy"] == PROBLEM.test_accuracy(final)
    assert 'dataset = "tiny"' in (tmp_path / "run" / "config.toml").read_text()
    assert not any(row.get("incidents") for row in rows)


@pytest.mark.parametrize(("recipe", "downlink"), some_recipes("exact", "condensed"))
def test_every_recipe_ends_with_the_simulators_model(tmp_path, recipe, downlink):
    options = {"run_dir": "", "client_state_dir": "context", "rounds": 4}
    federation = Federation(tmp_path, recipe=recipe, downlink=downlink, **options)
    simulation = reference(recipe, 4, downlink=make_downlink(downlink))
    assert np.array_equal(federation.run(), simulation.parameters)


scalars = st.integers(-(2**63), 2**63 - 1) | st.floats()
scalars |= st.text(max_size=9) | st.binary(max_size=40)
records = st.one_of(
    st.dictionaries(st.text(max_size=9) | st.just("bytes"), scalars, max_size=3).map(ConfigRecord),
    st.binary(max_size=40).map(
        lambda data: ArrayRecord({"bytes": Array("uint8", (len(data),), "bytes", data)})
    ),
    st.dictionaries(st.text(max_size=9), st.floats(), max_size=2).map(MetricRecord),
)


@given(st.dictionaries(st.sampled_from(["aqg", "other"]), records))
def test_content_of_any_kind_is_read_or_refused(content):
    with pytest.raises((MessageError, WireError)):  # nobody finds a checksum by chance
        Envelope.unpack(RecordDict(content))


HOSTILE = "gone\n2026 round 9: all is well\x1b[2J\x1b]0;title\x07\r\u202e\u2028\x00"


def test_what_a_node_says_cannot_write_to_the_terminal(tmp_path, caplog):
    def speak(node, reply):
        if round_of(reply) == 2:
            if node == 18:
                change_reply(reply, fault=HOSTILE)
            elif node == 11:
                return make_message(reply.metadata, error=Error(7, HOSTILE))
            else:
                reply.content[HOSTILE] = ConfigRecord({HOSTILE: HOSTILE})
        return reply

    federation = Federation(tmp_path, rounds=2)
    federation.grid.answer = speak
    with caplog.at_level(logging.INFO, "flwr.aqg"):
        federation.run()
    row = federation.rows()[1]
    texts = [incident["text"] for incident in row["incidents"]]
    assert len(texts) == 2
    for text in (*texts, *(record.getMessage() for record in caplog.records)):
        assert text.isprintable(), text
        assert len(text) < 700
    assert any("gone 2026 round 9: all is well\\x1b[2J" in text for text in texts)


@pytest.mark.parametrize(
    ("lie", "num_clients"),
    [(math.inf, 2), (math.nan, 3), (10**400, 3), (1e300, 2), (-1e300, 3), (1e300, 3)],
)
def test_one_liar_cannot_stop_a_run(tmp_path, lie, num_clients):
    def answer(node, reply):
        if node == 18 and (round_of(reply) or reply.metadata.message_type == "evaluate"):
            change_metrics(reply, loss=lie)
        return reply

    honest, lied = (Federation(tmp_path / name, rounds=4) for name in ("honest", "lied"))
    for federation in (honest, lied):
        federation.config["num-clients"] = num_clients
        nodes = federation.grid.node_configs.items()
        few = {node: own for node, own in nodes if own["partition-id"] < num_clients}
        federation.grid.node_configs = few
    lied.grid.answer = answer
    same = np.array_equal(lied.run(), honest.run())
    assert same == (abs(lie) <= 1e300)  # what is no number is refused, and the update with it
    kind = "outlier" if same else "rejected"
    assert lied.incidents()[kind] == [(k, 1) for k in (1, 2, 3, 4)]
    assert not honest.total("outliers")
    for row, fair in zip(lied.rows(), honest.rows(), strict=True):
        assert row["loss"] == pytest.approx(fair["loss"], rel=0.5)
    assert not lied.summary["diverged"]
    assert lied.summary["final_loss"] < lied.rows()[0]["loss"]

    # and when it alone answers
    alone = Federation(tmp_path / "alone", rounds=2)
    alone.grid.answer = lambda node, reply: answer(node, reply) if node == 18 else None
    alone.run()
    assert [row["loss"] for row in alone.rows()] == [None] * 2
    assert alone.incidents()[kind] == [(1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("recipe", "downlink", "optimizer"),
    [("lean", "exact", "sgd"), ("onebit", "full", "sgd"), ("lean", "condensed", "adam")],
)
def test_a_killed_server_goes_on_and_ends_where_it_would_have(
    tmp_path, recipe, downlink, optimizer
):
    federation = Federation(tmp_path, recipe=recipe, downlink=downlink, optimizer=optimizer)
    for number in (3, 6):  # killed after the round was taken in, before its checkpoint
        with pytest.raises(KilledError):
            federation.run(loggers=[Killer(number)])
        assert len(federation.rows()) == number
        federation.grid.run_id += 1  # a new run of Flower: its context is fresh
        federation.grid.contexts.clear()
    final = federation.run()
    training = {"downlink": make_downlink(downlink), "optimizer": make_optimizer(optimizer)}
    assert np.array_equal(final, reference(recipe, 8, **training).parameters)
    assert [row["round"] for row in federation.rows()] == list(range(1, 9))
    assert federation.total("lost") == federation.total("resyncs") == 0
    assert federation.agree()
    assert federation.summary["rounds"] == 8


@pytest.mark.parametrize("downlink", ["exact", "condensed"])
def test_a_server_back_from_an_older_checkpoint_is_found_out(tmp_path, downlink):
    federation = Federation(tmp_path, checkpoint_every=4, downlink=downlink, round_timeout=30.0)
    with pytest.raises(KilledError):
        federation.run(loggers=[Killer(7)])
    federation.run()
    for kind in ("resync", "lost"):
        assert sorted(federation.incidents()[kind]) == [(5, 0), (5, 1), (5, 2)]
    assert all(width >= 0 for width in federation.rows()[4]["widths"])
    assert federation.agree()


def test_a_directory_that_cannot_be_gone_on_from_is_left_alone(tmp_path):
    federation = Federation(tmp_path, rounds=3)
    federation.run()
    federation.config["num-server-rounds"] = 4
    file = tmp_path / "run" / "checkpoint.npz"
    arrays = federation.checkpoint
    mirrors = arrays["mirrors-0"].copy()
    mirrors[2, 5] += 1
    for spoil, complaint in (
        (lambda: write_arrays(file, arrays | {"mirrors-0": mirrors}), "mirror 2 has changed"),
        (lambda: write_arrays(file, arrays | {"format": np.array(2)}), "format 2; .* reads 7"),
        (lambda: np.savez(file, round=3), "not a server's"),
        (lambda: file.write_bytes(b"PK"), "missing or damaged"),
        (file.unlink, "rounds but no checkpoint"),
    ):
        spoil()
        with pytest.raises(RunError, match=complaint):
            federation.run()


def test_weights_follow_the_samples_of_whoever_takes_a_place(tmp_path):
    federation = Federation(tmp_path, trust_partition_id=False, weighting="samples", rounds=6)

    def replace_node(message):  # client 2 leaves; one with less data comes
        del federation.grid.node_configs[25]
        federation.grid.node_configs[90] = {"partition-id": 0, "aqg-state-dir": str(tmp_path)}
        return LOST

    federation.grid.deliver = at(3, 25, replace_node)
    federation.run()
    assert federation.incidents()["resync"] == [(4, 2)]
    saved = federation.checkpoint
    sizes = np.array([len(PROBLEM.clients[index].labels) for index in (0, 1, 0)])
    assert saved["num_samples"].tolist() == sizes.tolist()
    assert np.array_equal(saved["weights"], sizes / sizes.mean())
    total = saved["weights"] @ saved["mirrors-0"]
    assert np.allclose(saved["total"], total, rtol=0, atol=1e-12)


def claim(samples):
    """Return what lets a node say that it has so many samples."""
    return at(range(1, 9), 18, lambda reply: change_metrics(reply, **{"num-examples": samples}))


IMPOSSIBLE = [-1, 0, -(2**63), 2**53 + 1, 0.5, [10, 20]]


@pytest.mark.parametrize(("samples", "trust"), crossed(IMPOSSIBLE, [True, False]))
def test_a_node_with_impossible_samples_is_refused_and_named(tmp_path, samples, trust):
    federation = Federation(tmp_path, weighting="samples", rounds=3, trust_partition_id=trust)
    federation.grid.answer = claim(samples)
    federation.run()
    assert federation.incidents()["rejected"] == [(k, 1) for k in (1, 2, 3)]
    (refusal,) = federation.rows()[0]["incidents"]
    assert refusal["node"] == 18
    assert f"num-examples {samples}; with weighting samples it must be 1 to" in refusal["text"]
    assert [row["widths"][1] for row in federation.rows()] == [DROPPED] * 3
    federation.config["num-server-rounds"] = 5
    federation.grid.answer = claim(10)
    federation.run()
    assert federation.rows()[-1]["widths"][1] != DROPPED


def test_a_client_counts_for_no_more_than_the_largest_share(tmp_path):
    federation = Federation(tmp_path, weighting="samples", rounds=3)
    federation.grid.answer = claim(10**15)
    federation.run()
    (incident,) = federation.rows()[0]["incidents"]
    text = "reports 1000000000000000 samples; it counts for 0.6 of all"
    assert incident == {"client": 1, "node": 18, "kind": "capped", "text": text}
    weights = federation.checkpoint["weights"]
    assert weights[1] / weights.sum() == pytest.approx(0.6)
    assert weights.mean() == pytest.approx(1)
    federation.config |= {"num-server-rounds": 4, "max-share": 0.4}
    with pytest.raises(ConfigError, match=r"max-share 0.6, and max-share is 0.4"):
        federation.run()


def test_impossible_samples_weigh_no_evaluation(tmp_path, caplog):
    def lie(node, reply):
        if reply.metadata.message_type == "evaluate":
            change_metrics(reply, **{"num-examples": 1e308})
        return reply

    federation = Federation(tmp_path, weighting="samples", rounds=1)
    federation.grid.answer = lie
    federation.run()
    assert "num-examples 1e+308; with weighting samples it must be 0 to" in caplog.text
    assert federation.summary["final_loss"] == federation.rows()[-1]["loss"]


def test_two_servers_do_not_share_a_run_directory(tmp_path):
    federation = Federation(tmp_path, rounds=2)

    class Second(RunLogger):
        def start(self, config, next_round):
            with pytest.raises(RunError, match="in use by another process"):
                Federation(tmp_path).run()

    federation.run(loggers=[Second()])
    assert len(federation.rows()) == 2


@pytest.mark.parametrize(("recipe", "downlink"), crossed(["qgd", "onebit", "qsgd"], DOWNLINKS))
def test_too_few_replies_make_no_step(tmp_path, recipe, downlink):
    thetas = []

    def watched(train, params, number, key):
        if key[1] == 0:
            thetas.append(params.tobytes())
        return train(params, number, key)

    options = {"recipe": recipe, "downlink": downlink, "min_clients": 3, "rounds": 5}
    federation = Federation(tmp_path, other_task(watched), **options)
    federation.grid.answer = at(3, 18)
    federation.run()
    assert [row["stepped"] for row in federation.rows()] == [True, True, False, True, True]
    assert thetas[2] == thetas[3] != thetas[4]
    assert federation.agree()
    assert federation.total("lost") == 0


def test_a_run_that_gets_nowhere_stops_with_advice(tmp_path):
    federation = Federation(tmp_path, max_failed_rounds=1, round_timeout=0.05, start_timeout=0.05)
    federation.grid.answer = lambda node, reply: None if round_of(reply) > 2 else reply
    with pytest.raises(RunError, match="2 rounds in a row had fewer than 1 valid"):
        federation.run()
    federation.grid.answer = lambda node, reply: reply
    federation.run()
    assert len(federation.rows()) == 8
    federation.config["num-server-rounds"] = 9
    federation.grid.node_configs.clear()
    with pytest.raises(RunError, match=r"0 clients are connected after 0\.05 s, and 1 are needed"):
        federation.run()


def test_client_and_server_must_mean_the_same_recipe(tmp_path):
    federation = Federation(tmp_path, max_failed_rounds=0, round_timeout=0.1)
    federation.grid.client_app = make_client_app(task_of, recipe=make_recipe("laq"))
    with pytest.raises(RunError, match="1 rounds in a row"):
        federation.run()
    assert "do not agree on recipe 'qgd'" in federation.rows()[0]["incidents"][0]["text"]


@pytest.mark.parametrize("downlink", [pytest.param("full", marks=pytest.mark.soak), "exact"])
def test_large_models_travel_as_arrays(tmp_path, downlink):
    size = LARGE_BYTES // 3
    kinds = set()

    def train(params, round_number, key):
        return 1.0, np.random.default_rng(key).standard_normal(size).astype(np.float32)

    def watch(node, message):
        kinds.update(f"{name} {type(r).__name__}" for name, r in message.content.items())
        return message

    options = {"recipe": "gd", "rounds": 2, "round_timeout": 60.0, "downlink": downlink}
    federation = Federation(tmp_path, lambda _: FlowerTask(train, 5), **options)
    federation.grid.deliver = federation.grid.answer = watch
    start = np.random.default_rng(9).standard_normal(size).astype(np.float32)
    final = federation.run(start)
    assert {"arrays ArrayRecord", "aqg ArrayRecord"} <= kinds
    total = sum(train(None, k, (0, m, k))[1] * 1.0 for k in (1, 2) for m in range(3))
    assert np.allclose(final, start - ALPHA * total, atol=1e-5)
    assert federation.agree()


def test_tensorboard_shows_every_round(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    federation = Federation(tmp_path, tensorboard=True, metrics_every=3)
    federation.run(evaluate=PROBLEM.test_accuracy)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("aqg/test_accuracy")] == [1, 4, 7]
    losses = events.Scalars("aqg/loss")
    rows = federation.rows()
    assert [event.step for event in losses] == [row["round"] for row in rows]
    assert [event.value for event in losses] == pytest.approx([row["loss"] for row in rows])
    for name in ("upload_bytes", "download_bytes", "total_bytes"):
        sizes = events.Scalars(f"aqg/{name}")
        assert [event.value for event in sizes] == [row[name] for row in rows]
    sizes = events.Scalars("aqg/client-1/download_bytes")
    assert [event.value for event in sizes] == [row["client_download_bytes"][1] for row in rows]
    assert "aqg/incidents/resyncs" in events.Tags()["scalars"]
    widths = events.Scalars("aqg/client-1/width")
    assert [event.value for event in widths] == [row["widths"][1] for row in rows]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, within MLflow
def test_mlflow_has_every_round_and_goes_on(tmp_path):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    federation = Federation(tmp_path, mlflow=uri, metrics_every=1)
    values = iter([0.5, math.nan, *[0.75] * 20])

    def measure(params):
        return {"own": next(values), "size": float(len(params))}

    client = MlflowClient(tracking_uri=uri)
    with pytest.raises(KilledError):
        federation.run(loggers=[Killer(4)], evaluate=measure)
    experiment = client.get_experiment_by_name("aqg")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert run.data.params["recipe"] == "qgd"
    federation.run(evaluate=measure)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    rows = federation.rows()
    losses = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "loss")}
    assert losses == pytest.approx({row["round"]: row["loss"] for row in rows})
    own = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "test_own")}
    assert math.isnan(own[2])
    assert (own[1], own[8]) == (0.5, 0.75)
    assert rows[1]["test_own"] is None
    final_loss = federation.summary["final_loss"]
    assert run.data.metrics["summary/final_loss"] == pytest.approx(final_loss)
    with pytest.raises(ConfigError, match="mlflow is 'gopher://nowhere', which cannot be used"):
        Federation(tmp_path / "other", mlflow="gopher://nowhere").run()


def test_an_app_may_bring_settings_of_its_own(tmp_path):
    federation = Federation(tmp_path, rounds=1)
    del federation.config["num-clients"]
    with pytest.raises(ConfigError, match="run-config has no num-clients"):
        federation.run()
    federation.run(settings={"num-clients": 3})


def test_a_new_run_forgets_runs_that_were_left_a_month_ago(tmp_path):
    Federation(tmp_path, rounds=2).run()
    place = tmp_path / "nodes" / "partition-0"
    left = {path.name for path in place.iterdir()}
    recent = place / "recent"
    shutil.copytree(min(place.iterdir()), recent)
    index = json.loads((recent / "state.json").read_text())
    (recent / "state.json").write_text(json.dumps(index | {"key": "recent"}))
    foreign = place / "thesis"
    foreign.mkdir()
    (foreign / "state.json").write_text("mine")
    days = 86_400
    for path in place.iterdir():
        then = time.time() - {"recent": 29, "thesis": 1000}.get(path.name, 31) * days
        os.utime(path / "state.json", (then, then))
    Federation(tmp_path, rounds=2, run_dir=str(tmp_path / "other")).run()
    names = {path.name for path in place.iterdir()}
    assert not names & left
    assert {"recent", "thesis"} < names


def test_nodes_forget_a_run_that_ended_well(tmp_path):
    federation = Federation(tmp_path, rounds=2)
    federation.grid.keeps_memories = False
    federation.run()
    assert [list(federation.place_of(client).iterdir()) for client in range(3)] == [[]] * 3


LOCAL = LocalTraining(batch_size=2, steps=3)


def local_federation(path, **config):
    """Return clients that train as the simulator's do, on noisy mini-batches."""

    def make_task(context):
        return FlowerTask.from_objective(PROBLEM.objective, *samples_of(context), LOCAL)

    return Federation(path, make_task, rounds=12, exact=False, **config)


@pytest.mark.parametrize(
    ("recipe", "downlink"), [*(("auto", downlink) for downlink in DOWNLINKS), ("lean", "exact")]
)
def test_noisy_updates_end_with_the_simulators_model(tmp_path, recipe, downlink):
    federation = local_federation(tmp_path, recipe=recipe, downlink=downlink)
    simulation = reference(recipe, 12, local=LOCAL, downlink=make_downlink(downlink))
    assert np.array_equal(federation.run(), simulation.parameters)
    if recipe == "auto":
        other = local_federation(tmp_path / "other", recipe=recipe, downlink=downlink)
        other.config["exact"] = True
        assert not np.array_equal(other.run(), simulation.parameters)


@pytest.mark.parametrize(("recipe", "participation"), crossed(["auto", "qsgd"], [1.0, 0.67]))
def test_steps_that_set_themselves_are_the_simulators(tmp_path, recipe, participation):
    config = {"recipe": recipe, "alpha": 0.0, "downlink": "auto", "fraction-train": participation}
    federation = local_federation(tmp_path, **config)
    with pytest.raises(KilledError):
        federation.run(loggers=[Killer(7)])
    final, chosen = federation.run(), make_recipe(recipe)
    rule = resolve_step("auto", chosen, False, make_optimizer("sgd"))
    assert not isinstance(rule, Fixed)
    how = {"local": LOCAL, "participation": participation, "step": rule}
    simulation = reference(recipe, 12, 1 / 3, **how, downlink=resolve_downlink("auto", chosen))
    assert np.array_equal(final, simulation.averaged)
    assert not np.array_equal(final, simulation.parameters)
    fixed = local_federation(tmp_path / "fixed", **config, step="fixed").run()
    assert not np.array_equal(fixed, final)


def test_a_run_does_not_go_on_with_other_steps(tmp_path):
    federation = local_federation(tmp_path, recipe="auto", alpha=0.0, step="dog")
    with pytest.raises(KilledError):
        federation.run(loggers=[Killer(3)])
    federation.config["step"] = "fixed"
    with pytest.raises(ConfigError, match=r"step dog:average=8.* and step is fixed"):
        federation.run()


def test_a_run_stops_where_it_diverges_and_after_enough_time_or_bytes(tmp_path):
    federation = Federation(tmp_path / "diverges", alpha=1e9, recipe="gd", rounds=50)
    final = federation.run()
    assert 2 <= len(federation.rows()) < 50
    assert np.isfinite(final).all()
    assert federation.summary["diverged"]
    federation = Federation(tmp_path, rounds=500, max_seconds=0.5)
    federation.run()
    assert 1 <= len(federation.rows()) < 100
    assert (tmp_path / "run/model.safetensors").exists()
    federation = Federation(tmp_path / "bytes", rounds=100, max_bytes=8000)
    federation.run()
    totals = np.cumsum([row["total_bytes"] for row in federation.rows()])
    assert totals[-1] >= 8000 > totals[-2]


@pytest.mark.parametrize(("monitor", "sign"), [("accuracy", 1), ("-error", -1), ("score", 1)])
def test_no_progress(tmp_path, monitor, sign):
    """Rises, then stays: patience counts from the best on; NaN is no progress, and null on file."""
    values = iter([0.1, 0.2, 0.3, 0.3, math.nan, 0.2, *[0.1] * 50])
    federation = Federation(tmp_path, rounds=40, patience=3, monitor=monitor, metrics_every=1)
    name = monitor.removeprefix("-")
    federation.run(evaluate=lambda _: {name: sign * next(values), "other": 1.0})
    rows = federation.rows()
    assert len(rows) == 6
    assert rows[4][f"test_{name}"] is None
    assert rows[0]["test_other"] == 1.0
    assert federation.summary["rounds"] == 6
