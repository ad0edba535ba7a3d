"""Functions from users' files, and studies of their own: runs listed, or yielded by one."""

import json
import tomllib

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.errors import ConfigError
from aqg.runs.config import resolve
from aqg.spec import Code, file_digest, load_file
from aqg.studies.sweep import call_study, expand

from tests.commands import shown_on


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the study that the page shows, and go there."""
    (tmp_path / "widths.py").write_text(shown_on("how-to/sweeps.md", "widths.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.soak
def test_the_study_of_the_page(folder, capsys):
    pytest.importorskip("torch")
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


def test_a_changed_file_is_another_file(file):
    before, digest = load_file(file), file_digest(file)
    assert load_file(file) is before
    file.write_text(SOURCE + "\nlater = 1\n")
    assert file_digest(file) != digest
    assert load_file(file).later == 1


def test_the_files_of_a_folder_import_each_other(tmp_path):
    (tmp_path / "helper_of_own.py").write_text("VALUE = 5\n")
    (tmp_path / "main.py").write_text(
        "from helper_of_own import VALUE\ndef f():\n    return VALUE\n"
    )
    assert Code.parse(f"{tmp_path}/main.py:f").call() == 5
