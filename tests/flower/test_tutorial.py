"""The app of ``docs/tutorials/first-flower-app.md``, taken from the page, on a grid in memory."""

import logging
import re
import tomllib
from pathlib import Path

import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from tests.flower.memory_grid import MemoryGrid

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "first-flower-app.md"
TEXT = PAGE.read_text(encoding="utf-8")
APP = re.search(r"<!-- file: app.py -->\n```python\n(.*?)```", TEXT, re.DOTALL)[1]
PROJECT = re.search(r"<!-- file: pyproject.toml -->\n```toml\n(.*?)```", TEXT, re.DOTALL)[1]
PLAIN = {"ClientApp(mods=[aqg_mod])": "ClientApp()", "= Compressed(FedAvg(": "= (FedAvg("}
NUM_CLIENTS = 5


def run(app, capsys, caplog):
    """Return the accuracies, and kilobytes up and down of every round that says them."""
    module = {"__name__": "app"}
    exec(compile(app, "app.py", "exec", dont_inherit=True), module)
    nodes = {
        100 + m: {"partition-id": m, "num-partitions": NUM_CLIENTS} for m in range(NUM_CLIENTS)
    }
    module["main"](MemoryGrid(module["client"], nodes), None)
    said = capsys.readouterr().out + caplog.text
    caplog.clear()
    accuracies = [float(x) for x in re.findall(r"round \d+: accuracy ([\d.]+)", said)]
    line = r"aqg: ([\d.]+) kB up \(of [\d.]+ kB\), ([\d.]+) kB down"
    return accuracies, [[float(x) for x in pair] for pair in re.findall(line, said)]


@pytest.mark.soak
def test_the_app_is_compressed_and_as_good(tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level(logging.INFO, "flwr")
    monkeypatch.setenv("AQG_STATE_DIR", str(tmp_path / "state"))
    accuracies, sizes = run(APP, capsys, caplog)
    plain = APP
    for line, without in PLAIN.items():
        assert line in plain
        plain = plain.replace(line, without)
    plain_accuracies, plain_sizes = run(plain, capsys, caplog)
    assert not plain_sizes
    assert len(sizes) == 20
    assert len(accuracies) == len(plain_accuracies) == 21  # before the first round, too
    printed = re.search(r"^aqg: ([\d.]+) kB up .*, ([\d.]+) kB down", TEXT, re.MULTILINE)
    assert printed is not None
    assert sizes[-1][0] == pytest.approx(float(printed[1]), rel=0.1)
    most = float(re.search(r"they receive up to ([\d.]+) kB", TEXT)[1])  # entries differ in length
    assert float(printed[2]) <= most
    assert max(down for _, down in sizes[1:]) < 1.2 * most
    shown = float(re.search(r"^round 20: accuracy ([\d.]+)", TEXT, re.MULTILINE)[1])
    assert accuracies[-1] == pytest.approx(shown, abs=0.02)
    assert plain_accuracies[-1] == pytest.approx(shown, abs=0.02)


def test_the_project_names_the_app_and_what_it_needs():
    project = tomllib.loads(PROJECT)
    module = {"__name__": "app"}
    exec(compile(APP, "app.py", "exec", dont_inherit=True), module)
    components = project["tool"]["flwr"]["app"]["components"]
    assert {place.partition(":")[0] for place in components.values()} == {"app"}
    assert isinstance(module[components["serverapp"].partition(":")[2]], ServerApp)
    assert isinstance(module[components["clientapp"].partition(":")[2]], ClientApp)
    assert any(name.startswith("aqg[flower") for name in project["project"]["dependencies"])
    assert "run_simulation" not in TEXT  # Flower deprecates it
