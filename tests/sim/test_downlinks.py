"""Models as logs in both simulators: the same bytes, the same models, whoever was away."""

from dataclasses import replace

import pytest

from aqg.core.downlink import Condensed, Exact, make_downlink
from aqg.core.optimizers import make_optimizer
from aqg.core.recipes import make_recipe
from aqg.errors import ConfigError, RunError
from aqg.sim.engine import FastSimulation
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import Dropout, LocalTraining, Training

from tests.problems import check_engines, check_torch, crossed, some_recipes, tiny_problem

LOCAL = LocalTraining(batch_size=4, steps=3, rate=0.05)
SETTINGS = {
    "all take part": ({}, None),
    "sampled, adam": (
        {"participation": 0.5, "optimizer": make_optimizer("adam"), "weighting": "samples"},
        Dropout(absences=((1, 3, 15), (3, 9, 18))),
    ),
    "noisy, momentum": (
        {"local": LOCAL, "participation": 0.7, "optimizer": make_optimizer("momentum:beta=0.5")},
        Dropout(0.3, seed=8),
    ),
}
FIRST = [
    "sampled, adam",
    *(pytest.param(s, marks=pytest.mark.soak) for s in ("all take part", "noisy, momentum")),
]
ROUNDS = 20


def terms(name, setting, downlink, dtype="float64"):
    problem = tiny_problem(num_clients=6, unequal=True)
    initial = problem.initial_params.astype(dtype)
    clients = tuple(
        samples._replace(features=samples.features.astype(dtype)) for samples in problem.clients
    )
    problem = replace(problem, initial_params=initial, clients=clients)
    options, dropout = SETTINGS[setting]
    training = Training(downlink=make_downlink(downlink), **options)
    step = 0.02 if "adam" in setting else 0.1
    arguments = (problem, make_recipe(name, max_staleness=15), step, dropout, 4)
    return arguments, {"training": training}


def simulations(*setting):
    arguments, options = terms(*setting)
    return ReferenceSimulation(*arguments, **options), FastSimulation(*arguments, **options)


@pytest.mark.parametrize("setting", FIRST)
@pytest.mark.parametrize(("name", "downlink"), some_recipes("condensed", "exact"))
def test_the_engine_counts_what_the_reference_sends(name, downlink, setting):
    arguments, options = terms(name, setting, downlink)
    check_engines(*arguments, **options, rounds=ROUNDS)


@pytest.mark.parametrize("setting", FIRST)
@pytest.mark.parametrize(("name", "dtype"), some_recipes("float32", "float64"))
def test_exact_entries_make_the_model_of_full_downloads(name, setting, dtype):
    _, full = simulations(name, setting, "full", dtype)
    _, exact = simulations(name, setting, "exact", dtype)
    for _ in range(ROUNDS):
        one, other = full.run_round(), exact.run_round()
        assert sum(other.client_download_bytes) == other.download_bytes
        no_downloads = {"download_bytes": 0, "client_download_bytes": ()}
        assert other._replace(**no_downloads) == one._replace(**no_downloads)
    assert exact.parameters.tobytes() == full.parameters.tobytes()


def test_a_state_without_a_log_does_not_fit():
    _, full = simulations("lean", "all take part", "full")
    _, exact = simulations("lean", "all take part", "exact")
    with pytest.raises(RunError, match="does not fit"):
        exact.restore(full.state())
    with pytest.raises(RunError, match="does not fit"):
        full.restore(exact.state())


def test_a_client_that_was_away_for_long_takes_a_snapshot():
    problem = tiny_problem(num_clients=4)
    away = Dropout(absences=((2, 2, 150),))
    training = Training(downlink=Condensed(), local=LOCAL)
    arguments = (problem, make_recipe("qsgd"), 0.1, away, 4)
    simulation = ReferenceSimulation(*arguments, training=training)
    for _ in range(150):
        simulation.run_round(evaluate=False)
    log = simulation.log
    missed = log.bytes_since(2)
    record = simulation.run_round()
    others = 3 * (log.deliver(150, lambda: b"", lambda: None).num_bytes)
    assert simulation.models[2].round == 151
    assert record.download_bytes - others < missed
    fast = FastSimulation(*arguments, training=training)
    records = [fast.run_round(evaluate=False) for _ in range(151)]
    assert records[-1].download_bytes == record.download_bytes


@pytest.mark.parametrize(
    ("name", "downlink"), crossed(["lean", "auto", "qsgd"], ["condensed", "exact"])
)
def test_torch_publishes_the_same(name, downlink):
    pytest.importorskip("torch")
    problem = tiny_problem(num_clients=6, unequal=True)
    training = Training(downlink=make_downlink(downlink), local=LOCAL)
    arguments = (problem, make_recipe(name), 0.05, Dropout(0.3, seed=1), 4)
    check_torch(*arguments, training=training, rounds=30, rel=1e-6)


def test_bad_settings_are_named():
    with pytest.raises(ConfigError, match="unknown downlink 'half'"):
        make_downlink("half")
    with pytest.raises(ConfigError, match="has no option 'c'"):
        make_downlink("condensed:c=1")
    with pytest.raises(ConfigError, match="tolerance is -1"):
        make_downlink("condensed:tolerance=-1")
    with pytest.raises(ConfigError, match="ratio is 0"):
        make_downlink("condensed:ratio=0")
    with pytest.raises(ConfigError, match="bits is 9"):
        make_downlink("condensed:bits=9")
    assert make_downlink("exact") == Exact()


@pytest.mark.parametrize(("name", "downlink"), [("auto", "condensed:ratio=0.5"), ("qsgd", "exact")])
def test_clients_that_hold_nothing_train_alike_and_receive_more(name, downlink):
    """Entries since the first model, their sum or a snapshot: the same model, at a higher price."""
    options = {"local": LOCAL, "participation": 0.5, "downlink": make_downlink(downlink)}
    problem = tiny_problem("float32", num_clients=6)
    kept, none, reference = (
        simulate(problem, make_recipe(name), 0.1, seed=4, training=Training(**options, memory=m))
        for simulate, m in (
            (FastSimulation, "model"),
            (FastSimulation, "none"),
            (ReferenceSimulation, "none"),
        )
    )
    one, other = list(kept.run_rounds(ROUNDS)), list(none.run_rounds(10))
    none.restore(none.state())
    other += none.run_rounds(ROUNDS - 10)
    assert other == [reference.run_round() for _ in range(ROUNDS)]
    assert none.parameters.tobytes() == kept.parameters.tobytes()
    assert [r.upload_bytes for r in one] == [r.upload_bytes for r in other]
    assert sum(r.download_bytes for r in other) > 1.2 * sum(r.download_bytes for r in one)


def test_recipes_that_need_a_memory_say_so():
    for name in ("lean", "stc"):
        training = Training(memory="none", local=LOCAL)
        with pytest.raises(ConfigError, match="memory is 'none' with a recipe whose clients"):
            FastSimulation(tiny_problem(), make_recipe(name), 0.1, training=training)
    with pytest.raises(ConfigError, match="memory is 'all'; choose from model, none"):
        FastSimulation(tiny_problem(), make_recipe("qsgd"), 0.1, training=Training(memory="all"))
