"""The examples: Flower apps before and after, data of their own, and HTTP on a bad network."""

import argparse
import difflib
import gzip
import importlib
import importlib.util
import io
import json
import logging
import re
import sys
import threading
import time
import tomllib
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from aqg.cli.app import run_app
from aqg.protocol import ClientSession, ServerSession
from aqg.runs.directory import ROUNDS, SUMMARY
from aqg.spec import Code

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
    kept = [[labels for _, labels in shares[alpha]] for alpha in shares]
    even, skewed = ([one.bincount(minlength=10) / len(one) for one in found] for found in kept)
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


FILES = {"heart": "heart/processed.va.data", "watch": "watch/watch_windows.npz"}
FILES |= dict.fromkeys(("shakespeare", "lora"), "shakespeare/roles.json.gz")
FILES["cifar10"] = "cifar10.npz"


def spec(name, **options):
    rest = "".join(f":{key}={value}" for key, value in options.items())
    return f"{EXAMPLES / name}.py:problem{rest}"


def need(name, data_dir):
    if not (data_dir / FILES[name]).exists():
        pytest.skip(f"needs {FILES[name]} in the data directory; see examples/{name}.py")


@pytest.mark.parametrize(
    "name", ["heart", *(pytest.param(n, marks=pytest.mark.soak) for n in FILES if n != "heart")]
)
def test_an_example_is_one_command(name, data_dir, tmp_path):
    need(name, data_dir)
    problem = spec(name, fraction=0.1)
    options = ["--data-dir", str(data_dir), "--rounds", "3", "--recipe", "gd"]
    assert run_app(["run", "--problem", problem, *options, "--out", str(tmp_path / "out")]) == 0
    run = tmp_path / "out/gd"
    lines = [json.loads(line) for line in (run / ROUNDS).read_text().splitlines()]
    summary = json.loads((run / SUMMARY).read_text())
    assert summary["final_loss"] < lines[0]["loss"]
    assert (run / "best.safetensors").exists()


def make(name, data_dir, **options):
    need(name, data_dir)
    code = Code.parse(spec(name, **options))
    return code.call(data_dir=data_dir, seed=0, dtype="float32")


def test_the_watch_is_tested_on_other_persons(data_dir):
    problem = make("watch", data_dir)
    with np.load(data_dir / FILES["watch"]) as data:
        sizes = np.bincount(data["subject"])
    assert [len(client.labels) for client in problem.clients] == sizes[1:9].tolist()
    assert len(problem.test.labels) == sizes[9:].sum()


def test_shakespeare_has_a_client_per_role(data_dir):
    problem = make("shakespeare", data_dir, fraction=0.1)
    assert problem.num_clients == 4
    for samples in (*problem.clients, problem.test):
        # The target at each place is the next input.
        assert np.array_equal(samples.features[0, 1:], samples.labels[0, :-1])
    assert [metric.name for metric in problem.metrics] == ["accuracy", "perplexity"]


@pytest.mark.soak
def test_lora_sends_its_thin_matrices_alone(data_dir):
    problem = make("lora", data_dir, fraction=0.01)
    names = [spec.name for spec in problem.objective.model_layout.parameters]
    assert len(names) == 8
    assert all("lora_" in name for name in names)
    total = sum(p.numel() for p in problem.objective.module.parameters())
    assert problem.objective.num_params < total / 20


FILE = Path(__file__).parents[2] / "examples/http/federated.py"
NUM_ROUNDS = 25


@pytest.fixture(scope="module")
def federated():
    spec = importlib.util.spec_from_file_location("federated", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROUNDS = NUM_ROUNDS
    return module


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Network:
    """Sends requests: not at all, without their response, twice, late, or as they are."""

    def __init__(self, request):
        self.request, self.rng = request, np.random.default_rng(0)
        self.seen, self.late = Counter(), []

    def __call__(self, address, method, client, body=None):
        trouble = self.rng.choice(["lose", "mute", "twice", "late", ""], p=[0.1] * 4 + [0.6])
        self.seen[trouble + method] += 1
        sent = (address, method, client, body)
        if trouble == "lose":
            raise OSError("lost on the way there")
        if trouble == "twice":
            self.request(*sent)
        if trouble == "late" and body is not None:  # a second copy comes long after its round
            self.late.append(threading.Timer(0.5, self.request, sent))
            self.late[-1].start()
        response = self.request(*sent)
        if trouble == "mute":
            raise OSError("lost on the way back")
        return response


def learn(federated, path):
    session = ServerSession(np.zeros(8), 3, recipe="lean", path=path / "server")
    handler = type("Own", (federated.Handler,), {"session": session, "lock": threading.Lock()})
    with serving(handler) as address:
        with ThreadPoolExecutor(3) as pool:
            for client in range(3):
                own = ClientSession(path / str(client))
                gradient = federated.gradient_of(client)
                pool.submit(federated.take_part, address, client, own, gradient)
        for timer in getattr(federated.request, "late", ()):
            timer.join()
    assert session.round == NUM_ROUNDS + 1
    return session.parameters


def test_trouble_changes_nothing(federated, tmp_path, monkeypatch):
    """Every round waits for all clients, so the model is that of an undisturbed run."""
    started = time.monotonic()
    calm = learn(federated, tmp_path / "calm")
    network = Network(federated.request)
    monkeypatch.setattr(federated, "request", network)
    troubled = learn(federated, tmp_path / "troubled")
    for kind in ("lose", "mute", "twice", "late"):
        assert network.seen[kind + "POST"] > 0, network.seen
        assert network.seen[kind + "GET"] > 0, network.seen
    # Replies arrive in another order, and sums may differ in the last bit.
    assert np.allclose(calm, troubled, rtol=0, atol=1e-12)
    assert np.abs(calm - np.arange(8.0)).max() < 1  # from seven, in few rounds
    assert time.monotonic() - started < 60
