"""The apps for Flower before and after: two lines more, and many bytes less."""

import argparse
import difflib
import gzip
import importlib
import io
import json
import logging
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_packaging import OLDEST

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def changes(example):
    """Return all lines of Python that differ."""
    found = []
    for before in sorted((EXAMPLES / example / "before").rglob("*.py")):
        after = EXAMPLES / example / "after" / before.relative_to(EXAMPLES / example / "before")
        one, other = (path.read_text().splitlines() for path in (before, after))
        lines = difflib.unified_diff(one, other, lineterm="", n=0)
        found += [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return found


@pytest.mark.parametrize("example", ["flower-pytorch", "flower-lora"])
def test_the_change_is_two_lines_and_their_imports(example):
    assert changes(example) == [
        "+from aqg.flower import aqg_mod",
        "-app = ClientApp()",
        "+app = ClientApp(mods=[aqg_mod])",
        "+from aqg.flower import Compressed",
        "+    strategy = Compressed(strategy)",
    ]


def test_the_lines_in_the_readme_are_those_of_the_example():
    app = EXAMPLES / "flower-pytorch" / "after"
    section = (ROOT / "README.md").read_text().split("## Your own Flower app\n")[1]
    shown = section.split("```python\n")[1].split("```")[0].splitlines()
    assert len(shown) == 2
    for line in shown:
        code, _, comment = line.partition("#")
        file, _, imported = comment.strip().partition(": ")
        lines = [found.strip() for found in (app / "digits" / file).read_text().splitlines()]
        assert code.strip() in lines
        assert imported in lines
    project = tomllib.loads((app / "pyproject.toml").read_text())["project"]
    [own] = re.findall(r"pip install '(aqg\[.*?\])'", section.split("```python")[0])
    assert own in project["dependencies"]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in Flower
def test_the_app_is_one_that_flowers_hub_takes():
    build = pytest.importorskip("flwr.cli.build")
    content = io.BytesIO(build.build_fab_from_disk(EXAMPLES / "flower-pytorch/after"))
    with zipfile.ZipFile(content) as fab:
        names = set(fab.namelist())
        project = tomllib.loads(fab.read("pyproject.toml").decode())
    assert {"LICENSE", "pyproject.toml", "digits/task.py"} <= names
    assert project["tool"]["flwr"]["app"]["fab-format-version"] == 1
    for other in EXAMPLES.glob("flower-*/*/pyproject.toml"):
        for dependency in tomllib.loads(other.read_text())["project"]["dependencies"]:
            assert Requirement(dependency).name != "flwr" or dependency == f"flwr>={OLDEST}"


@pytest.fixture
def _partitioners(monkeypatch):
    """Offline: the images come from scikit-learn, and the partitioner is given them."""
    pytest.importorskip("torch")
    pytest.importorskip("flwr_datasets", reason="no flwr-datasets: pip install flwr-datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run_in_process(app, monkeypatch, **options):
    """Run four rounds of an app with the two lines; return accuracies and bytes up and down."""
    from benchmarks.dropin import run_app

    usual = {"recipe": None, "downlink": None, "strategy": "FedAvg", "eta": None, "dirichlet": 0.0}
    monkeypatch.setenv("AQG_STATE_DIR", "")
    before = set(sys.modules)
    found = run_app(app, True, 0, argparse.Namespace(rounds=4, **(usual | options)))
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("adapters", "digits"):
            del sys.modules[name]
    return found


@pytest.mark.usefixtures("_partitioners")
def test_images_are_dealt_by_labels_where_flowers_partitioners_are(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "flower-pytorch" / "after"))
    task = importlib.import_module("digits.task")
    shares = {
        alpha: [task.load_data(client, 3, alpha).dataset.tensors for client in range(3)]
        for alpha in (0.0, 0.1)
    }
    for name in [name for name in sys.modules if name.split(".")[0] == "digits"]:
        monkeypatch.delitem(sys.modules, name)
    even, skewed = (
        [labels.bincount(minlength=10) / len(labels) for _, labels in shares[alpha]]
        for alpha in shares
    )
    assert max(share.max() for share in even) < 0.15
    assert max(share.max() for share in skewed) > 0.25
    assert min(share.min() for share in skewed) < 0.01
    pixels = [sum(images.sum() for images, _ in found) for found in shares.values()]
    counts = [sum(len(labels) for _, labels in found) for found in shares.values()]
    assert counts[0] == counts[1] == 900
    assert pixels[0] == pytest.approx(pixels[1])  # every image is somebody's


@pytest.mark.soak
@pytest.mark.usefixtures("_partitioners")
def test_an_app_learns_from_images_dealt_by_labels(monkeypatch):
    accuracies, (up, down) = run_in_process("flower-pytorch", monkeypatch, dirichlet=0.3)
    whole = 3 * 4 * 4 * 283_786
    assert up < whole / 20
    assert down < whole / 10
    assert accuracies[-1] > accuracies[0] + 0.2


@pytest.mark.soak
def test_adapters_learn_with_few_bytes(monkeypatch):
    pytest.importorskip("torch")
    accuracies, (up, down) = run_in_process("flower-lora", monkeypatch)
    whole = 3 * 4 * 68_700
    assert up < whole / 20
    assert down < whole / 2  # each node receives the whole of it once
    assert accuracies[-1] > 0.25  # from 0.11, in four rounds


def test_the_tables_of_apps_are_those_of_their_runs():
    from benchmarks.dropin import read_rows, table_of_apps, table_of_beginnings, table_of_bytes

    rows = read_rows(ROOT / "results" / "apps.jsonl")
    page = (ROOT / "docs" / "reference" / "compressed.md").read_text()
    for table in (table_of_apps, table_of_bytes, table_of_beginnings):
        assert "\n".join(table(rows)) in page


def test_the_counter_of_flowertune_is_below_the_wrapper(tmp_path, monkeypatch):
    """The whole benchmark, with a small model and invented plays."""
    pytest.importorskip("torch")
    from benchmarks import flowertune

    roles = {f"play__{k}": ["to be or not to be, that is the question " * 20] for k in range(22)}
    (tmp_path / "shakespeare").mkdir()
    with gzip.open(tmp_path / "shakespeare" / "roles.json.gz", "wt") as file:
        json.dump(roles, file)
    out = tmp_path / "flowertune.md"
    small = ["--rounds", "12", "--base-steps", "1", "--width", "64", "--layers", "1"]
    monkeypatch.setenv("AQG_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("AQG_STATE_DIR", "")
    monkeypatch.setattr(sys, "argv", ["flowertune.py", *small, "--out", str(out)])
    try:
        flowertune.main()
    finally:
        logging.disable(logging.NOTSET)
    rows = [line.split("|") for line in out.read_text().splitlines() if " MB | " in line]
    (up, down, first), (own_up, own_down, own_first) = (
        [float(cell.split()[0]) for cell in row[3:6]] for row in rows
    )
    whole = 4 * 4 * 64 * 32 / 2**20  # four matrices of 32-bit numbers
    assert up == pytest.approx(2 * 12 * whole, rel=0.1)
    assert down == pytest.approx(up, rel=0.1)
    assert own_up < up / 10
    assert own_down - own_first < (down - first) / 5
