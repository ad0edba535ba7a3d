"""Clients cut into pieces and fused kernels give what the plain way gives."""

from __future__ import annotations

import numpy as np
import pytest

from aqg.core.grids import Grid
from aqg.core.innovation import measure
from aqg.core.recipes import make_recipe
from aqg.objectives import make_objective
from aqg.sim.engine import FastSimulation

from tests.problems import tiny_problem


def test_the_loss_of_absent_clients_counts_too():
    from aqg.core.dropouts import Absence, ScriptedDropout

    problem = tiny_problem(num_clients=4)
    dropout = ScriptedDropout((Absence(1, 2, 3), Absence(3, 1, 4)))
    simulation = FastSimulation(problem, make_recipe("aqg"), 0.05, dropout)
    for _ in range(5):
        expected = simulation.loss()
        assert simulation.run_round().loss == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("scaling", ["mean", "sum"])
def test_pieces_have_the_losses_and_gradients_of_whole_clients(scaling):
    torch = pytest.importorskip("torch")
    from aqg.sim.problem import Samples
    from aqg.sim.stacks import cut

    random = np.random.default_rng(4)
    objective = make_objective("softmax", 7, 3, 0.2, scaling)
    sizes = [1100, 512, 3, 700]
    clients = [
        Samples(random.standard_normal((size, 7)), random.integers(0, 3, size)) for size in sizes
    ]
    params = random.standard_normal(objective.num_params)
    pieces = cut(clients, objective.sample_weight, torch.tensor)
    assert pieces.features.shape == (3 + 1 + 1 + 2, 512, 7)
    losses, gradients = pieces.losses_and_gradients(objective, torch.tensor(params))
    for client, samples in enumerate(clients):
        loss, gradient = objective.losses_and_gradients(params, *samples)
        assert losses[client].item() == pytest.approx(loss, rel=1e-12)
        assert gradients[client].numpy() == pytest.approx(gradient, rel=1e-10, abs=1e-12)


def cuda_or_skip():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch


@pytest.mark.parametrize("grid", list(Grid))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("has_mirror", [True, False])
def test_fused_statistics_on_cuda(grid, dtype, has_mirror):
    torch = cuda_or_skip()
    from aqg.contrib.triton_kernels import compare
    from aqg.sim.torch_backend import read_statistics

    random = np.random.default_rng(3)
    gradients = random.standard_normal((5, 3000)) * 10.0 ** random.integers(-9, 9, (5, 1))
    gradients[3] = 0
    gradients[4, 7] = np.nan
    gradients = gradients.astype(dtype)
    held = gradients[::-1][[1, 1, 2, 1, 1]].copy()
    mirrors = torch.tensor(held, device="cuda") if has_mirror else None
    deltas, table = compare(grid, 4, torch.tensor(gradients, device="cuda"), mirrors)
    rows = gradients - held if has_mirror else gradients
    assert np.array_equal(deltas.cpu().numpy(), rows, equal_nan=True)
    expected, found = measure(rows, grid, 4), read_statistics(table.cpu().numpy(), 4)
    assert found.in_range.tolist() == expected.in_range.tolist() == [True] * 4 + [False]
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    for name in ("steps", "errors", "squared_norm", "quantized_norm"):
        ours, theirs = getattr(expected, name)[:4], getattr(found, name)[:4]
        assert theirs == pytest.approx(ours, rel=tolerance, abs=1e-300), name


def test_fused_cross_entropy_on_cuda():
    torch = cuda_or_skip()
    from aqg.objectives.closed_form import cross_entropy

    random = np.random.default_rng(3)
    logits, labels = random.standard_normal((3, 10, 77)) * 9, random.integers(0, 10, (3, 77))
    expected = cross_entropy(logits.copy(), labels)
    found = cross_entropy(torch.tensor(logits, device="cuda"), torch.tensor(labels, device="cuda"))
    for theirs, ours in zip(found, expected, strict=True):
        assert theirs.cpu().numpy() == pytest.approx(ours, rel=1e-12, abs=1e-12)
