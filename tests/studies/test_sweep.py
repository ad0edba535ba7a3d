"""Sweeps: the product, names, errors, resuming, and runs that fail or take their process along."""

import csv
import json
import os
import shutil

import pytest

from aqg.errors import AqgError, ConfigError, DataError
from aqg.runs.config import resolve
from aqg.runs.directory import CHECKPOINT, CONFIG, ROUNDS, SUMMARY, read_summary, read_toml
from aqg.runs.executor import Done, Failed, Processes, Reported, Started, carry_out, run_tasks
from aqg.runs.plan import Batch, prepare, train
from aqg.studies.sweep import GRID, TABLE, collect, create_sweep, expand, open_sweep, write_results
from aqg.weights import BEST, FINAL

from tests.commands import contents, run_alone

TEXT = """
rounds = 12
clients = 10
target = 1.0
[grid]
recipe = ["lean", "laq"]
partition = ["iid", "label"]
seed = [0, 1]
dropout = [0.5]
"""
FILES = {CONFIG, ROUNDS, CHECKPOINT, SUMMARY, BEST, FINAL}


@pytest.fixture(scope="module")
def workers():
    with Processes(2) as pool:
        yield pool


def go_on(workers, directory):
    """Do what is not finished; return the events, and what failed."""
    sweep = open_sweep(directory)
    batch = Batch(sweep.runs, directory)
    events = []
    minima = prepare(workers, [job.config for job in batch.left], None)
    carry_out(
        batch.next,
        lambda job: train(job, minima, directory, None),
        workers,
        batch.take,
        lambda job, event: events.append(event),
    )
    rows = collect(sweep, directory, batch.failures)
    write_results(directory, rows)
    return batch.left, events, batch.failures


@pytest.fixture(scope="module")
def finished(workers, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweep") / "whole"
    create_sweep(directory, TEXT.encode())
    environment = dict(os.environ)
    go_on(workers, directory)
    assert dict(os.environ) == environment
    return directory


def test_the_product_is_run_in_order_under_readable_names():
    document = {
        "dataset": "digits",
        "grid": {"recipe": ["lean:eta=0.3", "gd"], "partition": ["iid", "dirichlet:0.5"]},
    }
    sweep = expand(document)
    assert sweep.varying == ("recipe", "partition")
    assert [run.name for run in sweep.runs] == [
        "recipe-lean-eta-0.3_partition-iid",
        "recipe-lean-eta-0.3_partition-dirichlet-0.5",
        "recipe-gd_partition-iid",
        "recipe-gd_partition-dirichlet-0.5",
    ]
    expected = resolve({"recipe": "gd", "partition": "dirichlet:0.5"})
    assert (sweep.runs[3].config,) == expected
    assert sweep.settings_of(sweep.runs[3]) == {"recipe": "gd", "partition": "dirichlet:0.5"}
    # Defaults are those of each run.
    sweep = expand({"grid": {"dataset": ["digits", "heterogeneous"], "recipe": ["lean"]}})
    found = [(run.config.partition, run.config.clients) for run in sweep.runs]
    assert found == [("label", 10), ("source", 18)]


def test_names_stay_unique_and_short(tmp_path):
    plugins = [str(tmp_path / name) for name in ("a b.py", "a-b.py", "A-b.py", "c.py")]
    for path in plugins:
        open(path, "w").close()
    alike = expand({"recipe": "gd", "grid": {"plugins": [[path] for path in plugins]}})
    assert len({run.name.lower() for run in alike.runs}) == 4
    many = [[[client, first, first + 9] for client in range(9)] for first in (1, 2)]
    long = expand({"recipe": "gd", "grid": {"absences": many}})
    names = [run.name for run in long.runs]
    assert len(set(names)) == 2
    assert all(len(name) <= 120 and "/" not in name for name in names)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, r"no table \[grid\]"),
        ({"grid": 3}, r"no table \[grid\]"),
        ({"grid": {}}, r"no table \[grid\]"),
        ({"nope": 1, "grid": {"seed": [0]}}, "unknown setting 'nope'; choose from recipe"),
        ({"grid": {"nope": [0]}}, "unknown setting 'nope'; choose from recipe"),
        ({"grid": {"seed": 3}}, r"seed in \[grid\] is 3; it must be a list"),
        ({"grid": {"seed": []}}, r"seed in \[grid\] is \[\]; it must have at least 1 value"),
        ({"grid": {"seed": [1, 2, 1]}}, r"seed in \[grid\] has 1 twice"),
        ({"grid": {"dropout": [0, 0.0]}}, r"dropout in \[grid\] has 0.0 twice"),
        ({"seed": 1, "grid": {"seed": [1, 2]}}, r"seed is both fixed \(1\) and in \[grid\]"),
        ({"grid": {"recipe": ["gd", " gd"]}}, "are the same run, recipe-gd"),
        ({"recipe": "gd,laq", "grid": {"seed": [1]}}, "a run has 1 recipe, not 2"),
        ({"grid": {"seed": [1]}}, "a run has 1 recipe, not 3"),
        ({"recipe": "gd", "grid": {"rounds": [5, -5]}}, "rounds is -5; it must be at least 1"),
        ({"recipe": "gd", "grid": {"seed": [True]}}, "seed is True; it must be a whole number"),
        ({"grid": {"recipe": ["gd", "nope"]}}, "unknown recipe 'nope'"),
        ({"run": 3}, "run is not an array of tables"),
        ({"run": [{"recipe": "gd"}], "grid": {"seed": [1]}}, r"both \[grid\] and \[\[run\]\]"),
        ({"run": [{"recipe": "gd", "sead": 1}]}, "unknown setting 'sead'"),
        ({"run": [{"recipe": "gd"}, {"recipe": "gd"}]}, "are the same run"),
        ({"run": [{"recipe": "gd", "name": "a"}, {"recipe": "lean"}]}, "every run needs one"),
        ({"run": [{"recipe": "gd", "name": "../a"}]}, "name of a run is '../a'"),
        ({"run": [{"recipe": r, "name": "a"} for r in ("gd", "laq")]}, "two runs have the name"),
    ],
)
def test_a_bad_grid_or_list_is_refused_in_one_line(document, message):
    with pytest.raises(ConfigError, match=message) as caught:
        expand(document)
    assert "\n" not in str(caught.value)


def test_every_run_equals_a_run_of_its_own(finished, tmp_path):
    sweep = open_sweep(finished)
    assert len(sweep.runs) == 8
    assert Batch(sweep.runs, finished).left == []
    for run in sweep.runs[::3]:
        directory = finished / run.name
        assert {path.name for path in directory.iterdir()} == FILES
        assert resolve(read_toml(directory / CONFIG)) == (run.config,)
        alone = tmp_path / run.name
        run_alone(run.config, alone)
        assert contents(alone) == contents(directory)


def test_the_summaries_hold_a_row_per_run(finished):
    runs = json.loads((finished / SUMMARY).read_text())["runs"]
    with (finished / TABLE).open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["name"] for row in runs] == [row["name"] for row in table]
    assert len(runs) == 8
    for row, flat in zip(runs, table, strict=True):
        own = read_summary(finished / row["name"])
        kept = {key: value for key, value in own.items() if not key.startswith("client_")}
        assert {key: row[key] for key in kept} == kept
        assert len(kept) == len(own) - 2  # the bytes of each client stay where they are
        assert row["settings"].keys() == {"recipe", "partition", "seed", "dropout"}
        assert float(flat["dropout"]) == row["settings"]["dropout"]
        assert int(flat["upload_bytes"]) == own["upload_bytes"]
        reached = own["target"]["reached_round"]
        assert flat["target_reached_round"] == ("" if reached is None else str(reached))
    assert {row["target"]["reached_round"] is None for row in runs} == {True, False}


def test_going_on_after_a_crash_repeats_only_what_is_missing(workers, finished, tmp_path):
    directory = tmp_path / "crashed"
    shutil.copytree(finished, directory)
    cut, late, lost = (open_sweep(directory).runs[k].name for k in (0, 3, 6))
    for path in (directory / SUMMARY, directory / TABLE, directory / late / SUMMARY):
        path.unlink()
    (directory / cut / SUMMARY).unlink()
    (directory / cut / CHECKPOINT).unlink()
    text = (directory / cut / ROUNDS).read_text()
    (directory / cut / ROUNDS).write_text(text[: len(text) // 2])
    shutil.rmtree(directory / lost)
    times = {path: path.stat().st_mtime_ns for path in directory.glob(f"*/{SUMMARY}")}
    assert len(times) == 5

    runs, events, failures = go_on(workers, directory)
    assert {run.name for run in runs} == {cut, late, lost}
    assert not failures
    started = [runs[event.index].name for event in events if isinstance(event, Started)]
    assert sorted(started) == sorted([cut, late, lost])
    assert {event.index for event in events if isinstance(event, Done)} == {0, 1, 2}
    assert any(isinstance(event, Reported) for event in events)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert contents(directory) == contents(finished)


def test_another_grid_is_refused(finished, tmp_path):
    stored = read_toml(finished / GRID)
    assert open_sweep(finished, dict(reversed(stored.items()))) == open_sweep(finished)
    with pytest.raises(ConfigError, match=r"with rounds 13: the sweep has rounds 12"):
        open_sweep(finished, {**stored, "rounds": 13})
    other = {**stored, "grid": {**stored["grid"], "seed": [0]}}
    with pytest.raises(ConfigError, match=r"grid.seed \[0\]: the sweep has grid.seed \[0, 1\]"):
        open_sweep(finished, other)
    with pytest.raises(ConfigError, match=r"with alpha 0.1: the sweep has alpha missing"):
        open_sweep(finished, {**stored, "alpha": 0.1})
    edited = tmp_path / "edited"
    shutil.copytree(finished, edited)
    (edited / GRID).write_text(TEXT.replace("rounds = 12", "rounds = 15"))
    with pytest.raises(ConfigError, match=r"with rounds 15: the run has rounds 12"):
        Batch(open_sweep(edited).runs, edited)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"clients": 5}, DataError, "5"),
        ({"model": "mlp:4", "target": 0.1}, ConfigError, r"f\* is unknown for mlp:4"),
    ],
)
def test_a_run_that_cannot_start_stops_all_before_the_first(workers, settings, kind, message):
    sweep = expand({"partition": "label", **settings, "grid": {"recipe": ["gd", "lean"]}})
    with pytest.raises(kind, match=message):
        prepare(workers, [run.config for run in sweep.runs], None)


PLUGIN = """
import os, signal
from dataclasses import dataclass, replace
from pathlib import Path
from aqg.core.policies import Always
from aqg.core.recipes import make_recipe, register

@dataclass(frozen=True)
class Doomed(Always):
    harm: str = ""

    def decide(self, case):
        if Path(__file__).with_name("doom").exists():
            if self.harm == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("no\\nway")
        return super().decide(case)

@register("dies", "takes its process along")
def _dies(bits):
    return replace(make_recipe("gd"), policy=Doomed(32, "dies"))

@register("raises", "raises")
def _raises(bits):
    return replace(make_recipe("gd"), policy=Doomed(32, "raises"))
"""


def test_failures_cost_only_themselves(workers, tmp_path):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "doom").touch()
    directory = tmp_path / "sweep"
    grid = f'rounds = 4\nplugins = ["{tmp_path}/plugin.py"]\n[grid]\n'
    grid += 'recipe = ["dies", "raises", "gd", "laq", "lean"]\n'
    create_sweep(directory, grid.encode())
    runs, events, failures = go_on(workers, directory)
    assert {name: str(error) for name, error in failures.items()} == {
        "recipe-dies": "its process was killed (SIGKILL); this machine may be short of memory",
        "recipe-raises": "ZeroDivisionError: no way",
    }
    assert all(isinstance(error, AqgError) for error in failures.values())
    assert sum(isinstance(event, Failed) for event in events) == 2
    rows = {row["name"]: row for row in json.loads((directory / SUMMARY).read_text())["runs"]}
    assert rows["recipe-raises"]["error"] == "ZeroDivisionError: no way"
    assert all(rows[f"recipe-{name}"]["rounds"] == 4 for name in ("gd", "laq", "lean"))
    with (directory / TABLE).open(newline="") as file:
        errors = {row["name"]: row["error"] for row in csv.DictReader(file)}
    assert errors["recipe-gd"] == ""
    assert errors["recipe-raises"] == "ZeroDivisionError: no way"

    (tmp_path / "doom").unlink()
    runs, _, failures = go_on(workers, directory)
    assert [run.name for run in runs] == ["recipe-dies", "recipe-raises"]
    assert not failures
    bare = (directory / "recipe-gd" / ROUNDS).read_text()
    assert (directory / "recipe-dies" / ROUNDS).read_text() == bare


def test_workers_compute_with_one_thread(workers):
    assert run_tasks([_threads], workers) == [("1", "1")]


def _threads(contact):
    return os.environ["OMP_NUM_THREADS"], os.environ["NUMBA_NUM_THREADS"]
