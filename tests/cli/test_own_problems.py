"""A user's own data, models and problems: from files to results, and on after an interruption."""

import json
import tomllib

import numpy as np
import pytest
import torch
from torch import nn

import aqg
from aqg.cli.app import run_app
from aqg.runs import config as own
from aqg.runs.directory import CHECKPOINT, ROUNDS, SUMMARY
from aqg.weights import read_notes, to_bytes

from tests.commands import refuse
from tests.problems import soak

MODEL = """
from torch import nn

def make(input_shape, num_classes, width=6):
    return nn.Sequential(
        nn.Linear(input_shape[0], width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(width, num_classes),
    )

def regressor(input_shape):
    return nn.Linear(input_shape[0], 1)

def pairs(input_shape):
    return nn.Linear(input_shape[0], 2)

def no_module():
    return 5
"""
PROBLEM = """
import numpy as np
from torch import nn
from torch.utils.data import TensorDataset
from aqg.sim.problem import Problem

SETTINGS = {"rounds": 6, "recipe": "auto,gd", "batch_size": 8, "local_steps": 2}

def problem(seed, data_dir, dtype, clients=3):
    random = np.random.default_rng(seed)
    y = random.integers(0, 2, (clients + 1, 30))
    x = random.standard_normal((clients + 1, 30, 4)) + y[..., None]
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return Problem.from_module(net, list(zip(x[1:], y[1:])), test=(x[0], y[0]), dtype=dtype)

def number():
    return 7
"""
LOCAL = ("--batch-size", "8", "--local-steps", "2", "--recipe", "auto", "--rounds", "6")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    centers = random.standard_normal((3, 5))
    y, y_test = random.integers(0, 3, 90), random.integers(0, 3, 30)
    x, x_test = (centers[y] + random.normal(0, 0.5, (90, 5)), centers[y_test])
    arrays = {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}
    np.savez("own.npz", **arrays, client=np.array(["ann", "bob", "cyd"])[np.arange(90) % 3])
    np.savez("plain.npz", **arrays)
    np.savez("numbers.npz", x_train=x, y_train=(x @ np.ones((5, 1))), x_test=x, y_test=x[:, :1])
    np.savez("row.npz", x_train=x, y_train=x @ np.ones(5), x_test=x, y_test=x[:, 0])
    tokens = (np.arange(60)[:, None] + np.arange(9)) % 7
    np.savez("tokens.npz", x_train=tokens[:, :-1], y_train=tokens[:, 1:])
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "problem.py").write_text(PROBLEM)
    return tmp_path


def run(*arguments):
    """Run the words of all texts."""
    assert run_app(["run", *" ".join(arguments).split()]) == 0


def test_own_data_run_as_they_are_split(folder, capsys):
    run("--dataset own.npz --rounds 5 --recipe lean --out out")
    config = tomllib.loads((folder / "out/config.toml").read_text())
    assert (config["partition"], config["clients"], config["model"]) == ("natural", 3, "softmax")
    assert config["files"][0][0] == str(folder / "own.npz")
    table = (folder / "out/clients.txt").read_text()
    assert [line.split()[-1] for line in table.splitlines()] == ["name", "ann", "bob", "cyd"]
    run("--dataset own.npz --partition iid --samples 30 --rounds 1 --recipe gd --out few")
    run("--dataset plain.npz --clients 6 --rounds 5 --recipe lean --out b")
    assert tomllib.loads((folder / "b/config.toml").read_text())["partition"] == "iid"
    assert run_app(["report", "out", "b", "--out", "page.html"]) == 0
    assert "own.npz" in (folder / "page.html").read_text()


def test_own_model_leaves_models_that_load(folder):
    run("--dataset own.npz --model model.py:make:width=4", *LOCAL, "--out out")
    namespace = {}
    exec(MODEL, namespace)
    modules = []
    for which, name in (("final", "model"), ("best", "best")):
        module = aqg.load_model(folder / "out/auto", namespace["make"]((5,), 3, 4), which=which)
        arrays = aqg.load_model(folder / "out/auto" / f"{name}.safetensors")
        assert set(arrays) == set(module.state_dict())
        modules.append(module)
    final, module = modules
    with np.load(folder / "out/auto" / CHECKPOINT) as checkpoint:
        flat = nn.utils.parameters_to_vector(final.parameters()).detach().numpy()
        assert np.array_equal(flat, checkpoint["model/step/mean"])
        assert not np.array_equal(flat, checkpoint["model/parameters"])
    # The best one is as good as the best line says, statistics and all.
    module.eval()
    with np.load("own.npz") as data:
        outputs = module(torch.from_numpy(data["x_test"]).float())
        accuracy = float((outputs.argmax(1).numpy() == data["y_test"]).mean())
    notes = read_notes(folder / "out/auto/best.safetensors")
    lines = [json.loads(line) for line in (folder / "out/auto" / ROUNDS).read_text().splitlines()]
    summary = json.loads((folder / "out/auto" / SUMMARY).read_text())
    measured = [line["test_accuracy"] for line in lines] + [summary["test_accuracy"]]
    assert notes["measure"] == "test_accuracy"
    assert float(notes["value"]) == max(measured) == pytest.approx(accuracy)
    assert int(notes["rounds"]) == measured.index(max(measured))


def test_runs_start_from_files(folder):
    options = ("--dataset", "own.npz", "--recipe", "gd")
    run(*options, "--rounds 8 --out whole")
    run(*options, "--rounds 5 --out first")
    run(*options, "--rounds 3 --init first/gd/model.safetensors --out second")
    tensors = aqg.load_model("whole/gd", which="final")
    shapes = {name: value.shape for name, value in tensors.items()}
    assert shapes == {"weight": (5, 3), "bias": (3,)}
    for name, value in aqg.load_model("second/gd", which="final").items():
        assert np.array_equal(value, tensors[name])  # gd remembers nothing but the model
    namespace = {}
    exec(MODEL, namespace)
    module = namespace["make"]((5,), 3)
    with torch.no_grad():
        module[1].running_mean += 3
    torch.save(module.state_dict(), "start.pt")
    options = ("--dataset", "own.npz", "--model", "model.py:make", "--init", "start.pt")
    run(*options, *LOCAL, "--set alpha=1e-12 --rounds 1 --out out")
    final = aqg.load_model("out/auto", which="final")
    for name, value in module.state_dict().items():
        if name.endswith(("weight", "bias")):
            assert np.allclose(final[name], value, atol=1e-6)
    assert (final["1.running_mean"] > 1).all()  # began at 3 and is on its way to the data's


def test_resume_knows_its_files_and_runs_no_code_unasked(folder, capsys, monkeypatch):
    options = ("--dataset", "own.npz", "--model", "model.py:make", *LOCAL)
    run(*options, "--out whole")
    run(*options, "--out half")
    for name in (SUMMARY, CHECKPOINT, "best.safetensors", "model.safetensors"):
        (folder / "half/auto" / name).unlink()
    refuse(capsys, "run", "--resume", "half", message="add --allow-code if you trust it")
    refuse(capsys, "run", "--config", "half/config.toml", message="would run model")
    refuse(capsys, "theory", "half", message="would run model")
    other = "model.py:make:width=9"
    refuse(capsys, "run", "--resume", "half", "--model", other, message="would run model")
    monkeypatch.chdir(folder / "half")
    assert run_app(["run", "--resume", ".", "--allow-code"]) == 0
    monkeypatch.chdir(folder)
    assert run_app(["run", "--resume", "half", "--model", "model.py:make"]) == 0
    for name in (ROUNDS, "best.safetensors", "model.safetensors"):
        half, whole = (folder / run / "auto" / name for run in ("half", "whole"))
        assert half.read_bytes() == whole.read_bytes()
    capsys.readouterr()
    (folder / "model.py").write_text(MODEL + "\n# changed\n")
    message = "model.py' is not the file that this run began with"
    refuse(capsys, "run", "--resume", "half", "--allow-code", message=message)
    (folder / "model.py").write_text(MODEL)
    np.savez("own.npz", **{**np.load("own.npz"), "x_test": np.zeros((30, 5))})
    message = "own.npz' is not the file that this run began with"
    refuse(capsys, "run", "--resume", "half", "--allow-code", message=message)


def test_a_problem_is_made_by_a_function(folder, capsys):
    run("--problem problem.py:problem:clients=4 --out out")
    config = tomllib.loads((folder / "out/config.toml").read_text())
    assert (config["clients"], config["rounds"], config["local_steps"]) == (4, 6, 2)
    assert config["alpha"] == pytest.approx(0.1 * 2 / 4)
    assert {path.name for path in (folder / "out").iterdir() if path.is_dir()} == {"auto", "gd"}
    first = (folder / "out/auto" / ROUNDS).read_text()
    own._make.cache_clear()  # as in another process
    torch.rand(3)
    run("--config out/config.toml --allow-code --out again")
    assert (folder / "again/auto" / ROUNDS).read_text() == first
    start = "out/auto/best.safetensors"
    run("--problem problem.py:problem:clients=4 --init", start, "--rounds 1 --out on")
    (line,) = (folder / "on/auto" / ROUNDS).read_text().splitlines()
    value = read_notes(folder / start)["value"]
    assert json.loads(line)["test_accuracy"] == pytest.approx(value)
    refuse(capsys, "run", "--resume", "out", message="would run problem")
    assert run_app(["report", "out", "--out", "page.html"]) == 0


def test_sweeps_take_own_problems(folder, capsys):
    (folder / "grid.toml").write_text('rounds = 3\nrecipe = "gd"\n[grid]\nseed = [0, 1]\n')
    command = "sweep grid.toml --problem problem.py:problem --jobs 1 --out out"
    assert run_app(command.split()) == 0
    assert (folder / "out/seed-1/best.safetensors").exists()
    (folder / "out/seed-1" / SUMMARY).unlink()
    capsys.readouterr()
    refuse(capsys, "sweep", "--resume", "out", message="would run problem")
    command = "sweep --resume out --problem problem.py:problem --jobs 1"
    assert run_app(command.split()) == 0
    (folder / "named.toml").write_text('problem = "problem.py:problem"\n[grid]\nseed = [0]\n')
    capsys.readouterr()
    refuse(capsys, "sweep", "named.toml", "--out", "b", message="would run problem")
    (folder / "problem.py").write_text(PROBLEM + "\n# changed\n")
    (folder / "out/seed-1" / SUMMARY).unlink()
    message = "is not the file that this run began with"
    refuse(capsys, "sweep", "--resume", "out", "--allow-code", message=message)


@pytest.mark.soak
def test_numbers_and_tokens_are_learned(folder):
    run("--dataset numbers.npz --model model.py:regressor", *LOCAL, "--out numbers --rounds 20")
    summary = json.loads((folder / "numbers/auto" / SUMMARY).read_text())
    assert summary["final_loss"] < 1
    assert read_notes(folder / "numbers/auto/best.safetensors")["measure"] == "test_mse"
    model = "transformer:width=16:layers=1:heads=2"
    options = f"--dataset tokens.npz --model {model} --clients 3 --set local_rate=0.5"
    run(options, "--batch-size 8 --local-steps 4 --rounds 12 --recipe gd --out t")
    lines = [json.loads(line) for line in (folder / "t/gd" / ROUNDS).read_text().splitlines()]
    assert lines[0]["loss"] > 1.8  # log 7 is 1.95
    assert lines[-1]["loss"] < 1.2
    assert read_notes(folder / "t/gd/best.safetensors")["measure"] == "loss"


@pytest.mark.parametrize(
    "model", ["cnn", soak("resnet8:norm=batch:width=4"), soak("resnet8:width=4")]
)
def test_built_in_models_learn_images(model, folder):
    options = "--clients 4 --partition iid --rounds 8 --out out"
    run("--dataset digits --model", model, *LOCAL, options)
    lines = [json.loads(line) for line in (folder / "out/auto" / ROUNDS).read_text().splitlines()]
    summary = json.loads((folder / "out/auto" / SUMMARY).read_text())
    assert summary["final_loss"] < lines[0]["loss"]


LOCALLY = " ".join(LOCAL)
REFUSED = {
    "run --nope": "--nope",
    "run --rounds many": "many",
    "run --participation 0": "participation is 0.0; it must be above 0 and at most 1",
    "run --device cuda:99": "cuda:99",
    "run --out /proc/nowhere": "'/proc/nowhere' cannot be made",
    "run --out full": "'full' is not empty",
    "run --resume nowhere": "'nowhere' is not a run directory",
    "run --config nowhere.toml": "'nowhere.toml' cannot be read",
    "run --config bad.toml": "is not valid TOML",
    "run --clients 2000 --partition iid": "among 2000 clients",
    "run --model nosuch": "unknown model 'nosuch'; choose from cnn, resnet8, transformer",
    "run --target 1e-3 --model mlp:3": "f* is unknown for mlp:3",
    "run --dataset nowhere.npz": "nowhere.npz' cannot be read: No such file",
    "run --dataset numbers.npz": "are not classes, so there is no model by default",
    "run --dataset numbers.npz --model softmax": "'softmax' needs one class per",
    "run --dataset plain.npz --partition natural": "a file with an array 'client'",
    "run --model resnet8:norm=layer": "'resnet8' 'layer'; choose from group",
    "run --model model.py:no_module": "returned int, not a torch.nn.Module",
    "run --model model.py:make": "train on minibatches",
    f"run --dataset row.npz --model model.py:pairs {LOCALLY}": "fails on 8 samples of",
    f"run --dataset row.npz --model model.py:regressor {LOCALLY}": "(8, 1)",
    "run --problem problem.py": "write FILE.py:FUNCTION",
    "run --problem problem": "problem is 'problem'; it must be FILE.py:FUNCTION",
    "run --problem problem.py:number": "returned int; it must return",
    "run --problem problem.py:problem --model softmax": "give one of them",
    "run --problem problem.py:problem --clients 9": "clients is 9, and",
    "run --init other.safetensors": "has no tensor 'weight', which the model has",
    "run --init nan.safetensors": "tensor 'bias' of",
    "sweep": "name a grid file",
    "sweep grid.toml --jobs 0": "jobs is 0; it must be at least 1",
    "sweep grid.toml --out full": "'full' is not empty",
    "sweep bad.toml": "is not valid TOML",
    "sweep --resume full": "'full' is not a sweep's directory",
    "sweep --resume x --out y": "--resume and --out exclude each other",
    "report": "Missing argument 'DIR...'",
    "report nowhere": "'nowhere' does not exist",
    "report full": "'full' is not a run directory and holds none",
    "report own.npz": "'own.npz' is not a directory",
    "theory --rounds 0": "rounds is 0; it must be at least 1",
    "recipes nosuch": "unexpected extra argument",
    "flower demo --nodes 0": "nodes is 0; it must be at least 1",
    "flower demo --out full": "'full' is not empty",
}


@pytest.mark.parametrize("command", REFUSED)
def test_bad_input_is_one_line_and_leaves_nothing(command, folder, capsys):
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").touch()
    (folder / "bad.toml").write_text("seed = [")
    (folder / "grid.toml").write_text('recipe = "gd"\n[grid]\nseed = [0]\n')
    (folder / "other.safetensors").write_bytes(to_bytes({"w": np.zeros(3)}, {}))
    wrong = {"weight": np.zeros((64, 10)), "bias": np.full(10, np.inf)}
    (folder / "nan.safetensors").write_bytes(to_bytes(wrong, {}))
    refuse(capsys, *command.split(), message=REFUSED[command])
