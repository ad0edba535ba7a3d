"""Studies of the user's own: runs listed one by one, or yielded by a function."""

import json
import tomllib

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.errors import ConfigError
from aqg.runs.config import resolve
from aqg.spec import Code
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
