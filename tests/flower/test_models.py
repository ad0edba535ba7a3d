"""Ordinary PyTorch models on Flower: what travels, what does not, and who refuses what."""

import numpy as np
import pytest
import torch
from torch import nn

import aqg
from aqg import make_recipe
from aqg.core.step_sizes import make_step
from aqg.errors import ConfigError
from aqg.flower import FlowerTask, flatten, load_flat
from aqg.objectives import Objective
from aqg.objectives.layout import ModelLayout
from aqg.sim.problem import Problem
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import LocalTraining, Training
from aqg.weights import read_notes

from tests.flower.federation import PROBLEM, samples_of
from tests.flower.federation import Federation as QuickFederation
from tests.modules import Masked

FEATURES = [torch.tensor(c.features, dtype=torch.float32) for c in PROBLEM.clients]
LABELS = [torch.tensor(c.labels) for c in PROBLEM.clients]
SIZES = np.array([len(labels) for labels in LABELS])


class Federation(QuickFederation):
    """Clients may take their time: torch is slow to start."""

    def __init__(self, path, task, **config):
        super().__init__(path, task, **{"round_timeout": 60.0, "start_timeout": 60.0, **config})


def normalized():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def layered():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))


class Adapted(nn.Module):
    """A frozen base with a low-rank adapter."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(6, 3).requires_grad_(False)
        torch.manual_seed(1)
        self.lora_a = nn.Linear(6, 2, bias=False)
        self.lora_b = nn.Linear(2, 3, bias=False)

    def forward(self, inputs):
        return self.base(inputs) + self.lora_b(self.lora_a(inputs))


def own_training(make, steps=3, seen=None, **options):
    """Return a task factory as an app has it: its own loop, in place."""

    def make_task(context):
        client = int(context.node_config["partition-id"])
        module = make()
        dtype = next(module.parameters()).dtype
        features = FEATURES[client].to(dtype)

        def train(module):
            optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
            module.train()
            for _ in range(steps):
                loss = nn.functional.cross_entropy(module(features), LABELS[client])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if seen is not None:
                state = {k: v.detach().clone() for k, v in module.state_dict().items()}
                seen.setdefault(client, []).append(state)
            return loss.item()

        def evaluate(module):
            module.eval()
            with torch.no_grad():
                return float(nn.functional.cross_entropy(module(features), LABELS[client]))

        return FlowerTask.from_training(module, train, len(features), evaluate, **options)

    return make_task


@pytest.mark.parametrize("is_flat", [False, True])
def test_parameters_and_statistics_are_those_of_federated_averaging(tmp_path, is_flat):
    """Also where the server starts from a flat vector, which cannot have statistics."""
    seen, make = {}, layered if is_flat else normalized
    options = {"recipe": "gd", "alpha": 0.0, "weighting": "samples", "downlink": "auto"}
    federation = Federation(tmp_path, own_training(make, seen=seen), rounds=1, **options)
    final = federation.run(flatten(make()) if is_flat else make())
    if is_flat:
        vector, final = final, make()
        load_flat(final, vector)
        assert np.array_equal(flatten(final), vector)
        with pytest.raises(ConfigError, match=r"have shape \(3,\); Sequential needs \(36,\)"):
            load_flat(final, np.zeros(3))
    for name, value in final.state_dict().items():
        clients = [seen[client][0][name].double().numpy() for client in range(3)]
        if name.endswith("num_batches_tracked"):
            assert value == 3
            continue
        mean = np.average(clients, axis=0, weights=SIZES)
        tolerance = 2.0**-10 if "running" in name else 1e-5
        np.testing.assert_allclose(value.numpy(), mean, rtol=tolerance, atol=1e-6, err_msg=name)
    (row,) = federation.rows()
    assert row["upload_bytes"] == sum(row["client_upload_bytes"])
    whole = 3 * sum(tensor.nbytes for tensor in final.state_dict().values())
    assert whole < row["download_bytes"] == sum(row["client_download_bytes"]) < whole + 6000
    assert row["total_bytes"] == row["upload_bytes"] + row["download_bytes"]


@pytest.mark.parametrize(
    ("statistics", "step"),
    [("average", "fixed"), ("average", "dog"), ("local", "fixed"), ("frozen", "fixed")],
)
def test_flower_ends_with_the_simulators_model(tmp_path, statistics, step):
    local = LocalTraining(batch_size=8, steps=3, rate=0.05)

    def make_task(context):
        return FlowerTask.from_module(
            normalized().double(), *samples_of(context), local=local, statistics=statistics
        )

    options = {"exact": False, "weighting": "samples", "step": step}
    federation = Federation(tmp_path, make_task, recipe="auto", rounds=5, **options)
    start = normalized().double()
    final = federation.run(start, statistics=statistics)
    objective = Objective.from_module(normalized().double(), statistics=statistics)
    problem = Problem(objective, PROBLEM.clients, objective.init_params(0))
    training = Training(local, weighting="samples", step=make_step(step))
    simulation = ReferenceSimulation(problem, make_recipe("auto"), 0.1, seed=0, training=training)
    losses = [simulation.run_round().loss for _ in range(5)]
    layout = ModelLayout.of(start, statistics=statistics)
    np.testing.assert_array_equal(layout.flatten(final), simulation.averaged)
    for name, tensor in start.state_dict().items() if statistics == "frozen" else ():
        assert "running" not in name or torch.equal(final.state_dict()[name], tensor)
    assert [row["loss"] for row in federation.rows()] == pytest.approx(losses, rel=0.02)
    if statistics == "average":  # they travel in half precision here, and finer in the simulator
        buffers, found = simulation.statistics.averaged(), layout.read_buffers(final)
        is_mean = (buffers.values != simulation.statistics.buffers().values).any()
        assert is_mean == (step == "dog")
        np.testing.assert_allclose(found.values, buffers.values, rtol=0.02, atol=0.1)
        np.testing.assert_array_equal(found.counts, buffers.counts)


def test_clients_that_measure_a_model_have_its_statistics_in_half_precision(tmp_path):
    variances = []

    def make_task(context):
        client = int(context.node_config["partition-id"])
        module, features = normalized(), FEATURES[client]

        def train(module):
            module.train()(features)
            return 1.0

        def evaluate(module):
            variances.append(module[1].running_var.double().numpy().copy())
            return 1.0

        return FlowerTask.from_training(module, train, len(features), evaluate)

    options = {"recipe": "auto", "rounds": 4, "step": "fixed", "client_eval_every": 4}
    federation = Federation(tmp_path, make_task, **options)
    final = federation.run(normalized())[1].running_var.double().numpy()
    for found in variances[-3:]:  # of the three clients, after the last round
        np.testing.assert_allclose(found, final, rtol=2.0**-11)


@pytest.mark.parametrize("on_disk", [True, False])
def test_local_statistics_stay_with_each_client(tmp_path, on_disk):
    seen = {}
    make_task = own_training(normalized, steps=1, seen=seen, statistics="local")
    federation = Federation(tmp_path, make_task, recipe="gd", rounds=3, alpha=0.0)
    if not on_disk:
        federation.config["client-state-dir"] = "context"
    federation.run(normalized(), statistics="local", evaluate=lambda module: 1 / 0)
    assert all("test_accuracy" not in row for row in federation.rows())
    for client in range(3):
        counts = [int(state["1.num_batches_tracked"]) for state in seen[client]]
        assert counts == [1, 2, 3]  # a client goes on from its own, in a new module each time
    means = [seen[client][-1]["1.running_mean"] for client in range(3)]
    assert not torch.equal(means[0], means[1])


@pytest.mark.parametrize("step", [pytest.param("fixed", marks=pytest.mark.soak), "dog"])
def test_a_server_that_is_started_again_goes_on_with_its_statistics(tmp_path, step):
    task, options = own_training(normalized), {"recipe": "lean", "step": step}
    whole = Federation(tmp_path / "whole", task, rounds=6, **options)
    expected = whole.run(normalized()).state_dict()
    halved = Federation(tmp_path / "halved", task, rounds=3, **options)
    halved.run(normalized())
    halved.config["num-server-rounds"] = 6
    found = halved.run(normalized()).state_dict()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_an_adapter_travels_and_its_base_does_not(tmp_path):
    federation = Federation(tmp_path, own_training(Adapted), recipe="signsgd", rounds=3, alpha=0.01)
    base = Adapted().base.weight.clone()
    final = federation.run(Adapted())
    assert torch.equal(final.base.weight, base)
    assert len(federation.checkpoint["parameters"]) == 12 + 6


def test_tied_weights_and_infinite_masks(tmp_path):
    federation = Federation(tmp_path, own_training(Masked), recipe="lean", rounds=3)
    final = federation.run(Masked())
    assert final.second.weight is final.first.weight
    assert len(federation.checkpoint["parameters"]) == 36 + 21
    assert torch.isneginf(final.mask).all()
    broken = Masked()
    with torch.no_grad():
        broken.head.bias[0] = torch.nan
    with pytest.raises(ConfigError, match=r"'head\.bias'.* holds NaN or infinity"):
        Federation(tmp_path / "b", own_training(Masked)).run(broken)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(tmp_path, dtype):
    def make():
        torch.manual_seed(4)
        return nn.Linear(6, 3).to(dtype)

    federation = Federation(tmp_path, own_training(make), recipe="gd", rounds=4, alpha=0.0)
    final = federation.run(make())
    parameters = federation.checkpoint["parameters"]
    assert parameters.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    assert final.weight.dtype == dtype
    if dtype == torch.bfloat16:  # the server holds more than the module can
        rounded = torch.from_numpy(parameters).to(dtype).float().numpy()
        assert (rounded != parameters).any()
    losses = [row["loss"] for row in federation.rows()]
    assert losses[-1] < losses[0]


class Adaptive(nn.Module):
    """A buffer of its own that training changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.linear = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs):
        if self.training:
            self.scale.mul_(0.9).add_(0.1 * inputs.abs().mean())
        return self.linear(inputs / self.scale)


def test_any_buffer_that_training_changes_is_averaged(tmp_path):
    federation = Federation(tmp_path, own_training(Adaptive), recipe="gd", rounds=2, alpha=0.0)
    final = federation.run(Adaptive())
    assert final.scale != 1
    assert not any(row.get("incidents") for row in federation.rows())


def bottleneck(width, inputs):
    """Of as many parameters, whatever the width."""
    return nn.Sequential(nn.Linear(6, width, bias=False), nn.Linear(inputs, 3, bias=False))


def as_vector(module):
    return ModelLayout.of(module).flatten(module)


WITHOUT_STATISTICS = "statistics such as '1.running_mean'|give make_server_app the module"
REFUSED = {
    "another base": (Adapted(), own_training(lambda: Adapted(seed=5)), "differ from the server's"),
    "another architecture": (
        bottleneck(4, 4),
        own_training(lambda: bottleneck(2, 8)),
        "the server's model is another: '0.weight' (2, 6) float32 of Sequential has shape (4, 6)",
    ),
    "no statistics": (as_vector(normalized()), own_training(normalized), WITHOUT_STATISTICS),
    "no buffers": (as_vector(Adaptive()), own_training(Adaptive), "training changes buffers of"),
    "statistics": (normalized(), own_training(normalized, statistics="local"), "are 'local' here"),
}


@pytest.mark.parametrize(("start", "task", "says"), REFUSED.values(), ids=REFUSED)
def test_what_a_client_has_otherwise_is_refused_by_name(tmp_path, start, task, says):
    federation = Federation(tmp_path, task, recipe="gd", rounds=1)
    federation.run(start)
    (text,) = federation.texts()
    assert all(part in text for part in says.split("|"))


@pytest.mark.parametrize("measures", [True, False])
def test_the_final_and_the_best_model_load_into_a_module(tmp_path, measures):
    """Without a test on the server the loss decides which one is best."""
    seen, (features, labels) = [], PROBLEM.test

    def accuracy(module):
        with torch.no_grad():
            outputs = module(torch.tensor(features, dtype=torch.float32))
        return float((outputs.argmax(1).numpy() == labels).mean())

    def evaluate(module):
        seen.append(accuracy(module))
        return seen[-1]

    options = {"recipe": "lean", "rounds": 6, "alpha": 1 / 3}
    federation = Federation(tmp_path, own_training(normalized), **options)
    final = federation.run(normalized(), evaluate=evaluate if measures else None)
    loaded = aqg.load_model(tmp_path / "run", normalized(), which="final")
    for name, value in final.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    notes = read_notes(tmp_path / "run" / "best.safetensors")
    assert notes["measure"] == ("test_accuracy" if measures else "loss")
    if measures:
        best = aqg.load_model(tmp_path / "run", normalized()).eval()
        assert float(notes["value"]) == max(seen) == pytest.approx(accuracy(best))
        assert int(notes["rounds"]) == seen.index(max(seen))
    vector = QuickFederation(tmp_path / "vector", rounds=2).run()
    saved = aqg.load_model(tmp_path / "vector/run", which="final")
    assert list(saved) == ["parameters"]
    assert np.array_equal(saved["parameters"], vector)
