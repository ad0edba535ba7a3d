"""Sweeps and studies of users' own: the product, names, errors, resuming, and runs that fail."""

import csv
import json
import os
import shutil
import tomllib

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.errors import AqgError, ConfigError, DataError
from aqg.runs.config import resolve
from aqg.runs.directory import CHECKPOINT, CONFIG, ROUNDS, SUMMARY, read_summary, read_toml
from aqg.runs.executor import Done, Failed, Processes, Reported, Started, carry_out, run_tasks
from aqg.runs.plan import Batch, prepare, train
from aqg.spec import Code, file_digest, load_file
from aqg.studies.sweep import (
    GRID,
    TABLE,
    call_study,
    collect,
    create_sweep,
    expand,
    open_sweep,
    write_results,
)
from aqg.weights import BEST, FINAL

from tests.commands import contents, plugin, run_alone, shown_on

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
    runs = batch.next, lambda job: train(job, minima, directory, None)
    carry_out(*runs, workers, batch.take, lambda job, event: events.append(event))
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
    grid = {"recipe": ["lean:eta=0.3", "gd"], "partition": ["iid", "dirichlet:0.5"]}
    document = {"dataset": "digits", "grid": grid}
    sweep = expand(document)
    assert sweep.varying == ("recipe", "partition")
    rules = ("recipe-lean-eta-0.3", "recipe-gd")
    splits = ("partition-iid", "partition-dirichlet-0.5")
    assert [run.name for run in sweep.runs] == [f"{r}_{s}" for r in rules for s in splits]
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


def test_every_run_equals_a_run_of_its_own_with_one_thread(finished, tmp_path, workers):
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
    assert run_tasks([_threads], workers) == [("1", "1")]


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


def test_a_run_that_cannot_start_stops_all_before_the_first(workers):
    few = ({"clients": 5}, DataError, "5")
    unknown = ({"model": "mlp:4", "target": 0.1}, ConfigError, r"f\* is unknown for mlp:4")
    for settings, kind, message in few, unknown:
        sweep = expand({"partition": "label", **settings, "grid": {"recipe": ["gd", "lean"]}})
        with pytest.raises(kind, match=message):
            prepare(workers, [run.config for run in sweep.runs], None)


def test_failures_cost_only_themselves(workers, tmp_path):
    doomed = 'if Path(__file__).with_name("doom").exists(): '
    text = plugin("dies", doomed + "os.kill(os.getpid(), signal.SIGKILL)")
    text += plugin("raises", doomed + 'raise ZeroDivisionError("no\\nway")')
    (tmp_path / "plugin.py").write_text(text)
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


def _threads(contact):
    return os.environ["OMP_NUM_THREADS"], os.environ["NUMBA_NUM_THREADS"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the study that the page shows, and go there."""
    (tmp_path / "widths.py").write_text(shown_on("how-to/sweeps.md", "widths.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.soak
def test_the_study_of_the_page(folder, capsys):
    assert run_app(["sweep", "widths.py:study:rounds=3", "--out", "widths", "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "4 runs (model × recipe × alpha)" in said
    assert "[4/4, " in said
    runs = json.loads((folder / "widths" / "summary.json").read_text())["runs"]
    assert [run["settings"]["recipe"] for run in runs] == ["gd", "lean"] * 2
    assert {run["rounds"] for run in runs} == {3}
    stored = tomllib.loads((folder / "widths" / "sweep.toml").read_text())
    assert stored["run"][3]["model"] == f"{folder}/widths.py:perceptron:width=32"

    # Going on calls no function of the study, and models in files only when allowed.
    (folder / "widths" / runs[1]["name"] / "summary.json").unlink()
    text = (folder / "widths.py").read_text()
    assert run_app(["sweep", "--resume", "widths"]) == 2
    assert "add --allow-code if you trust it" in capsys.readouterr().err
    (folder / "widths.py").write_text(text.replace("yield", "raise KeyError("))
    assert run_app(["sweep", "--resume", "widths", "--allow-code"]) == 2
    (folder / "widths.py").write_text(text)
    assert run_app(["sweep", "--resume", "widths", "--allow-code", "--jobs", "1"]) == 0
    assert "3 finished before" in capsys.readouterr().out
    assert json.loads((folder / "widths" / "summary.json").read_text())["runs"] == runs
    assert run_app(["report", "widths"]) == 0


def test_what_a_function_may_yield(tmp_path):
    file = tmp_path / "study.py"
    file.write_text(
        "import numpy as np\n"
        "from aqg.runs.config import resolve\n"
        "def study(count=2):\n"
        "    yield {'recipe': 'gd', 'seed': np.int64(count), 'absences': ((0, 1, 2),)}\n"
        "    yield resolve({'recipe': 'lean', 'rounds': 7})[0]\n"
    )
    first, second = call_study(Code.parse(f"{file}:study:count=3"), None)
    assert first == {"recipe": "gd", "seed": 3, "absences": [[0, 1, 2]]}
    assert type(first["seed"]) is int
    (run,) = expand({"run": [second]}).runs
    assert run.config == resolve({"recipe": "lean", "rounds": 7})[0]
    named = expand({"run": [{"name": "b", "recipe": "gd"}, {"name": "a", "recipe": "lean"}]})
    assert ([job.name for job in named.runs], named.varying) == (["b", "a"], ("recipe",))
    assert np.isclose(run.config.alpha, 0.1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "returned int; it must yield settings of runs"),
        ("return {'recipe': 'gd'}", "returned dict; it must yield"),
        ("return []", "yields no run; at least 1 is needed"),
        ("yield {'recipe': 'gd'}; yield 5", "yields a int as run 2; it must be settings"),
        ("yield {'recipe': 'gd'}; 1 / 0", "failed after 1 runs: ZeroDivisionError"),
        ("raise KeyError(3)", "failed: KeyError: 3"),
    ],
)
def test_a_bad_function_is_refused_in_one_line(tmp_path, body, message):
    (tmp_path / "study.py").write_text(f"def study():\n    {body}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        call_study(Code.parse(f"{tmp_path}/study.py:study"), None)
    assert "\n" not in str(caught.value)


SOURCE = r"""
from dataclasses import dataclass

@dataclass
class Made:
    shape: tuple
    width: int

def make(input_shape, width=3):
    return Made(input_shape, width)

def everything(**given):
    return given

def needy(colour):
    return colour

def failing():
    raise KeyError("no\nsuch thing")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return path


def test_a_function_gets_what_it_asks_for(file):
    code = Code.parse(f"{file}:make:width=7")
    made = code.call(input_shape=(2, 3), num_classes=4)
    assert (made.shape, made.width) == ((2, 3), 7)
    assert Code.parse(f"{file}:everything").call(a=1, b=2) == {"a": 1, "b": 2}
    assert Code.parse(str(code)) == code
    assert code.short == "own.py:make:width=7"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (":nothing", "has no function 'nothing'"),
        (":make:depth=2", r"make\(\) in .* has no option 'depth'; it has: width"),
        (":needy", "needs an argument 'colour'; what it can ask for by name is input_shape"),
        (":failing", r"failing\(\) in .* failed: KeyError: 'no\\nsuch thing'"),
        ("", "write FILE.py:FUNCTION"),
        (":make:width", "write FILE.py:FUNCTION"),
        (":2x", "write FILE.py:FUNCTION"),
    ],
)
def test_what_goes_wrong_is_one_line(file, rest, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Code.parse(f"{file}{rest}").call(input_shape=(2,))
    assert "\n" not in str(caught.value)


def test_a_file_that_fails_is_named(tmp_path):
    for source, message in {
        None: "own.py' cannot be read: No such file",
        "def f(:\n": "own.py' cannot be run: SyntaxError",
        "import nothing_of_this_name\n": "No module named 'nothing_of_this_name'",
    }.items():
        if source is not None:
            (tmp_path / "own.py").write_text(source)
        with pytest.raises(ConfigError, match=message):
            load_file(tmp_path / "own.py")


def test_a_changed_file_is_another_file_and_those_of_a_folder_import_each_other(file, tmp_path):
    before, digest = load_file(file), file_digest(file)
    assert load_file(file) is before
    file.write_text(SOURCE + "\nlater = 1\n")
    assert file_digest(file) != digest
    assert load_file(file).later == 1

    (tmp_path / "helper_of_own.py").write_text("VALUE = 5\n")
    (tmp_path / "main.py").write_text("from helper_of_own import VALUE\nf = lambda: VALUE\n")
    assert Code.parse(f"{tmp_path}/main.py:f").call() == 5
