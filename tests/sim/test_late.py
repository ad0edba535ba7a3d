"""Rounds that end before all replies are there, in simulated time."""

import json
from dataclasses import replace

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.core.downlink import make_downlink
from aqg.core.recipes import RECIPES, make_recipe
from aqg.core.server import age_weight
from aqg.errors import ConfigError
from aqg.objectives.base import Objective
from aqg.runs.cost import FIRST_ORDER_BYTES, ORDER_BYTES, REPLY_BYTES, Meter
from aqg.sim.engine import FastSimulation
from aqg.sim.late import Late, Outages, Speeds
from aqg.sim.record import AT_WORK, DROPPED, RoundRecord
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import Dropout, LocalTraining, Training

from tests.problems import check_engines, tiny_problem

LOCAL = LocalTraining(batch_size=8, steps=3, rate=0.05)
SPEEDS = Speeds(sigma=1.0, jitter=0.3)
NUM_CLIENTS = 6
WITHOUT_MIRRORS = [
    name if name != "auto" else "auto:share=0"  # else it depends on who waits for whom
    for name in RECIPES
    if not make_recipe(name).memory.keeps_mirror
]


def simulate(kind, name, late, *, seed=4, dropout=None, step_size=0.05, training=None, **options):
    problem = tiny_problem(num_clients=NUM_CLIENTS, unequal=True)
    recipe = make_recipe(name)
    training = replace(training or Training(LOCAL), late=late)
    return kind(problem, recipe, step_size, dropout, seed, training=training, **options)


def run(simulation, rounds=15):
    return [simulation.run_round() for _ in range(rounds)]


@pytest.mark.parametrize("name", ["auto", "fedavg", "qsgd", "onebit", "stc"])
@pytest.mark.parametrize("participation", [1.0, 0.67])
def test_engine_equals_the_reference_bit_for_bit(name, participation):
    late, recipe = Late(SPEEDS, 2, Outages(0.2, 3.0), mbit=0.01), make_recipe(name)
    downlink = make_downlink("full" if name == "fedavg" else "condensed")
    training = Training(LOCAL, participation=participation, downlink=downlink, late=late)
    problem = tiny_problem(num_clients=NUM_CLIENTS, unequal=True)
    arguments = (problem, recipe, 0.05, Dropout(0.1, seed=8), 4)
    reference, _ = check_engines(*arguments, training=training, rounds=15)
    assert reference.state().to_arrays()["late/lengths"].size  # of clients that have not replied


@pytest.mark.parametrize("name", WITHOUT_MIRRORS)
def test_a_round_that_waits_for_all_is_as_before(name):
    plain = simulate(FastSimulation, name, None)
    for late in (Late(SPEEDS, NUM_CLIENTS), Late(SPEEDS)):
        timed = simulate(FastSimulation, name, late)
        for record, expected in zip(run(timed, 8), run(plain, 8), strict=True):
            assert record._replace(simulated_seconds=None) == expected
        assert np.array_equal(timed.parameters, plain.parameters)
        plain = simulate(FastSimulation, name, None)


def test_a_late_update_is_that_of_the_model_it_began_with():
    """Two clients, one so slow that its first reply comes in the third round."""
    problem = tiny_problem(num_clients=2)
    late = Late(Speeds(share=0.5, times=2.5), buffer_size=1)
    training = Training(LOCAL, late=late)
    simulation = FastSimulation(problem, make_recipe("fedavg"), 0.05, seed=1, training=training)
    slow = int(np.argmax(late.speeds.of_clients(2, 1)))
    models, records = [simulation.parameters.copy()], []
    for _ in range(3):
        records.append(simulation.run_round())
        models.append(simulation.parameters.copy())
    assert [record.widths[slow] for record in records] == [AT_WORK, AT_WORK, 32]
    assert [record.widths[1 - slow] for record in records] == [32, 32, AT_WORK]
    assert [record.simulated_seconds for record in records] == [1.0, 2.0, 2.5]

    _, update = LOCAL.update(problem.objective, models[0], *problem.clients[slow], (1, slow, 1))
    sent = update.astype(np.float32).astype(np.float64)
    expected = models[2] - 0.05 * 2 * age_weight(2) * sent  # the mean of one, times two clients
    assert models[3] == pytest.approx(expected, rel=1e-6)


def test_slow_clients_do_not_hold_up_the_others():
    speeds = Speeds(share=0.34, times=100.0)
    waiting = run(simulate(FastSimulation, "auto", Late(speeds)), 10)
    buffered = run(simulate(FastSimulation, "auto", Late(speeds, 3)), 10)
    assert waiting[-1].simulated_seconds == pytest.approx(1000)
    assert buffered[-1].simulated_seconds == pytest.approx(10)
    assert all(record.num_uploads == 3 for record in buffered)


def test_transfers_take_time():
    slow = run(simulate(FastSimulation, "fedavg", Late(Speeds(), mbit=0.001)), 1)[0]
    moved = slow.client_upload_bytes[0] + slow.client_download_bytes[0]
    assert slow.simulated_seconds == pytest.approx(1 + moved * 8 / 1000)


def test_only_so_many_are_at_work():
    training = Training(LOCAL, participation=0.5)
    simulation = simulate(FastSimulation, "auto", Late(SPEEDS, 1), training=training)
    for record in run(simulation, 20):
        assert sum(width != DROPPED for width in record.widths) == 3
        assert record.num_uploads == 1


def test_bytes_of_those_at_work():
    widths = [(4, AT_WORK, DROPPED), (AT_WORK, 4, DROPPED)]
    rounds = [
        RoundRecord(k, None, row, 9, download_bytes=11) for k, row in enumerate(widths, start=1)
    ]
    meter = Meter(1000, Training(LOCAL, downlink=make_downlink("exact")))
    first, second = [meter.charge(record).total_bytes for record in rounds]
    assert first == 2020 + 2 * FIRST_ORDER_BYTES + REPLY_BYTES  # one of them has not replied
    assert second == 20 + ORDER_BYTES + REPLY_BYTES  # and does not need another order now


def test_statistics_that_the_server_averages_come_with_the_round():
    torch = pytest.importorskip("torch")
    problem = tiny_problem(num_clients=NUM_CLIENTS)
    layers = torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    objective = Objective.from_module(torch.nn.Sequential(*layers), torch.nn.MSELoss())
    start = objective.init_params(0).astype(problem.dtype)
    problem = replace(problem, objective=objective, initial_params=start)
    training = Training(LOCAL, late=Late(SPEEDS, 2))
    for kind in (FastSimulation, ReferenceSimulation):
        with pytest.raises(ConfigError, match="buffer_size is 2 with a module whose running"):
            kind(problem, make_recipe("auto"), 0.05, training=training)


def test_the_command_shows_time_and_bytes(tmp_path, capsys):
    out = tmp_path / "out"
    options = "--recipe auto,fedavg --rounds 6 --batch-size 16 --local-steps 2 --buffer-size 3"
    arguments = ["run", *options.split(), "--speeds", "lognormal:sigma=1", "--out", str(out)]
    assert run_app(arguments) == 0
    shown = capsys.readouterr().out
    assert " time " in shown
    lines = (out / "auto" / "rounds.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["simulated_seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert run_app(["run", "--resume", str(out), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["runs"][0]
    assert again["simulated_seconds"] == seconds[-1]
