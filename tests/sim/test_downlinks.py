"""Models as logs in both simulators: the same bytes, the same models, whoever was away."""

from dataclasses import replace

import pytest

from aqg.core.downlink import Condensed, Full, make_downlink
from aqg.core.optimizers import Adam
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import Fixed
from aqg.errors import ConfigError, RunError
from aqg.sim.engine import FastSimulation
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import Dropout, LocalTraining, Training

from tests.problems import in_setting, settings, tiny_problem

LOCAL = LocalTraining(batch_size=4, steps=3, rate=0.05)
ROUNDS = 20


@pytest.mark.parametrize(("recipe", "setting"), settings("exact", "exact, away", "dog, exact"))
def test_exact_entries_make_the_model_of_full_downloads(recipe, setting):
    for dtype in "float64", "float32":
        arguments, options = in_setting(recipe, setting, dtype)
        exact = FastSimulation(*arguments, **options)
        full = FastSimulation(*arguments, training=replace(options["training"], downlink=Full()))
        for _ in range(ROUNDS):
            one, other = full.run_round(), exact.run_round()
            assert sum(other.client_download_bytes) == other.download_bytes
            no_downloads = {"download_bytes": 0, "client_download_bytes": ()}
            assert other._replace(**no_downloads) == one._replace(**no_downloads)
        assert exact.parameters.tobytes() == full.parameters.tobytes()


@pytest.mark.parametrize(
    "changes", [{"downlink": Full()}, {"step": Fixed()}, {"optimizer": Adam()}], ids=str
)
def test_a_state_of_other_terms_does_not_fit(changes):
    arguments, options = in_setting("auto", "dog, condensed")
    found = FastSimulation(*arguments, **options)
    other = FastSimulation(*arguments, training=replace(options["training"], **changes))
    for one, state in (found, other.state()), (other, found.state()):
        with pytest.raises(RunError, match="does not fit"):
            one.restore(state)


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
