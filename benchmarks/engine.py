"""Seconds per round of the fast simulator, against the bare gradient and other simulators.

    python benchmarks/engine.py                            # W1..W4, a few minutes
    python benchmarks/engine.py --workloads W3 --json      # one of them, for machines
    python benchmarks/engine.py --clients-sweep            # 1,000 to 100,000 clients
    python benchmarks/engine.py --memory                   # of W2
    python benchmarks/engine.py --device cuda              # on a GPU

====  =======  =======  ========  ====================  =========
name  clients  samples  features  model                 precision
====  =======  =======  ========  ====================  =========
W1    10       6000     784       784-200-10 network    float32
W2    1000     60       784       784-200-10 network    float32
W3    18       267      34        logistic regression   float64
W4    10       6000     784       784→10 softmax        float32
====  =======  =======  ========  ====================  =========

The data is synthetic: Gaussian noise around one center per class. ``bare`` computes every client's
loss and gradient in batched torch and does nothing else: no server, no compression, no bytes. A
round of the engine includes everything, the exact length of every frame too.

All contestants take turns, window by window, so that noise hits them alike; a window is a few
rounds, and the smallest mean over a window is reported. The first rounds, in which all clients
upload, come before and are reported apart. Peers (FedJAX, pfl, Flower, FedLab) take part where they
are installed; they compute one full-batch step per client, with no compression.
"""

from __future__ import annotations

import os

# Before NumPy loads it: idle OpenBLAS threads spin for 27 ms by default, on cores that the
# statistics could use.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "8")

import argparse
import json
import platform
import resource
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from aqg.core.recipes import make_recipe
from aqg.objectives import make_objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RECIPES = ("gd", "laq", "aqg-2", "lean")
WARM_UP_ROUNDS = 2
LONGEST_WINDOW = 2.0
"""Seconds: slow contestants do fewer rounds in a window."""
L2 = 0.01
MIRROR_BYTES = 4 + 1
"""Per parameter and client: the mirror in float32, and the direction it last went, in int8."""


class Workload(NamedTuple):
    """Shapes, and how many rounds make a window."""

    num_clients: int
    num_samples: int
    num_features: int
    model: str
    dtype: str
    window: int
    repetitions: int

    @property
    def num_classes(self) -> int:
        return 2 if self.model == "logistic" else 10

    @property
    def step_size(self) -> float:
        return 0.1 / self.num_clients


WORKLOADS = {
    "W1": Workload(10, 6000, 784, "mlp:200", "float32", window=1, repetitions=6),
    "W2": Workload(1000, 60, 784, "mlp:200", "float32", window=1, repetitions=6),
    "W3": Workload(18, 267, 34, "logistic", "float64", window=100, repetitions=10),
    "W4": Workload(10, 6000, 784, "softmax", "float32", window=5, repetitions=6),
}


class Data(NamedTuple):
    """Features ``(M, n, f)`` and labels ``(M, n)`` of all clients."""

    features: np.ndarray
    labels: np.ndarray


class Timing(NamedTuple):
    """What a contestant took, in seconds per round; uploads are per round, all clients together."""

    first_round: float
    seconds: float
    uploads: float | None


def make_data(workload: Workload, seed: int = 0) -> Data:
    random = np.random.default_rng(seed)
    shape = (workload.num_clients, workload.num_samples)
    labels = random.integers(0, workload.num_classes, shape)
    centers = random.standard_normal((workload.num_classes, workload.num_features), np.float32)
    features = random.standard_normal((*shape, workload.num_features), np.float32)
    features *= 0.3
    for client, client_labels in enumerate(labels):
        features[client] += 0.1 * centers[client_labels]
    return Data(features.astype(workload.dtype, copy=False), labels)


def make_problem(workload: Workload, data: Data) -> Problem:
    objective = make_objective(
        workload.model, workload.num_features, workload.num_classes, L2, "mean"
    )
    clients = tuple(Samples(*samples) for samples in zip(*data, strict=True))
    return Problem(objective, clients, objective.init_params(0).astype(workload.dtype))


def bare_gradient(workload: Workload, problem: Problem, data: Data, device: str) -> Callable:
    """Return a function that computes all losses and gradients, by hand, in torch."""
    features = torch.as_tensor(data.features, device=device)
    labels = torch.as_tensor(data.labels, device=device)
    params = torch.as_tensor(problem.initial_params, device=device)
    num_clients, num_samples, num_features = features.shape
    gradients = torch.empty((num_clients, len(params)), dtype=params.dtype, device=device)
    flat = features.view(-1, num_features)  # the forward pass is one product for all clients
    rows = torch.arange(num_samples, device=device)
    inner = torch.arange(num_clients, device=device)[:, None]

    def logistic() -> None:
        signs = labels * 2 - 1
        margins = (flat @ params).view_as(labels) * signs
        torch.nn.functional.softplus(-margins).mean(dim=1)
        slopes = -signs * torch.sigmoid(-margins) / num_samples
        torch.bmm(features.transpose(1, 2), slopes[..., None], out=gradients[..., None])
        gradients.add_(params, alpha=L2)

    def layer_gradients(inputs: torch.Tensor, slopes: torch.Tensor, start: int) -> int:
        stop = start + inputs.shape[-1] * slopes.shape[-1]
        weights = gradients[:, start:stop].view(num_clients, inputs.shape[-1], -1)
        if slopes.shape[-1] <= 32:  # few outputs: faster as the rows of the product
            weights.copy_(_products(slopes.transpose(1, 2), inputs).transpose(1, 2))
        else:
            weights.copy_(_products(inputs.transpose(1, 2), slopes))
        gradients[:, stop : stop + slopes.shape[-1]] = slopes.sum(dim=1)
        return stop + slopes.shape[-1]

    def class_slopes(logits: torch.Tensor) -> torch.Tensor:
        log_probability = torch.log_softmax(logits.view(num_clients, num_samples, -1), dim=-1)
        -log_probability[inner, rows, labels].mean(dim=1)
        slopes = log_probability.exp_()
        slopes[inner, rows, labels] -= 1
        return slopes.div_(num_samples)

    def softmax() -> None:
        slopes = class_slopes(torch.addmm(params[-10:], flat, params[:-10].view(-1, 10)))
        layer_gradients(features, slopes, 0)
        gradients.add_(params, alpha=L2)

    def network() -> None:
        num_hidden = int(workload.model.partition(":")[2])
        split = num_features * num_hidden
        weight1, bias1 = params[:split].view(num_features, -1), params[split : split + num_hidden]
        weight2, bias2 = params[split + num_hidden : -10].view(num_hidden, 10), params[-10:]
        hidden = torch.addmm(bias1, flat, weight1).relu_()
        slopes = class_slopes(torch.addmm(bias2, hidden, weight2))
        hidden_slopes = (slopes.view(-1, 10) @ weight2.T).mul_(hidden > 0)
        start = layer_gradients(features, hidden_slopes.view(num_clients, num_samples, -1), 0)
        layer_gradients(hidden.view(num_clients, num_samples, -1), slopes, start)
        gradients.add_(params, alpha=L2)

    chosen = {"logistic": logistic, "softmax": softmax}.get(workload.model, network)

    def compute() -> torch.Tensor:
        chosen()
        if device != "cpu":
            torch.cuda.synchronize()
        return gradients

    _check_gradient(problem, data, compute())
    return compute


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``left @ right`` for each client, the way that is faster for its size and device."""
    if left.device.type == "cpu" and left.shape[-1] >= 1000:
        return torch.stack([torch.mm(a, b) for a, b in zip(left, right, strict=True)])
    return torch.bmm(left, right)


def _check_gradient(problem: Problem, data: Data, gradients: torch.Tensor) -> None:
    """Make sure that bare and engine compute the same."""
    _, expected = problem.objective.losses_and_gradients(
        problem.initial_params, data.features[0], data.labels[0]
    )
    difference = np.abs(gradients[0].cpu().numpy() - expected).max()
    if difference > 1e-4 * np.abs(expected).max():
        raise SystemExit(f"the bare gradient is off by {difference}")


def numpy_gradient(problem: Problem, data: Data) -> Callable:
    """Return stacked logistic gradients in NumPy, by hand: the bare loop of W3."""
    features, params = data.features, problem.initial_params
    signs = np.where(data.labels > 0, 1.0, -1.0).astype(features.dtype)
    num_samples = features.shape[1]
    transposed = features.swapaxes(1, 2)

    def compute() -> np.ndarray:
        margins = (features @ params) * signs
        decay = np.exp(-np.abs(margins))
        (np.log1p(decay) + np.maximum(-margins, 0)).mean(axis=1)
        slopes = -signs * np.where(margins < 0, 1.0, decay) / (1 + decay) / num_samples
        return (transposed @ slopes[..., None])[..., 0] + L2 * params

    return compute


def contestants(
    workload: Workload, data: Data, recipes: Sequence[str], device: str
) -> dict[str, Callable[[], Any]]:
    problem = make_problem(workload, data)
    found: dict[str, Callable[[], Any]] = {
        "bare": bare_gradient(workload, problem, data, device),
    }
    if workload.model == "logistic" and device == "cpu":
        found["bare (NumPy)"] = numpy_gradient(problem, data)
    for recipe in recipes:
        simulation = FastSimulation(problem, make_recipe(recipe), workload.step_size, device=device)
        found[recipe] = simulation.run_round
    if device == "cpu":
        from engine_peers import installed_peers

        found.update(installed_peers(workload, data))
    return found


def measure(name: str, recipes: Sequence[str], device: str) -> dict[str, Timing]:
    workload = WORKLOADS[name]
    data = make_data(workload)
    runs = contestants(workload, data, recipes, device)
    first = {key: _seconds(run) for key, run in runs.items()}
    windows = {}
    for key, run in runs.items():
        warm = min(_seconds(run) for _ in range(WARM_UP_ROUNDS))
        windows[key] = max(1, min(workload.window, round(LONGEST_WINDOW / warm)))
    best = dict.fromkeys(runs, float("inf"))
    uploads: dict[str, list[int]] = {key: [] for key in runs}
    for _ in range(workload.repetitions):
        for key, run in runs.items():
            start = time.perf_counter()
            results = [run() for _ in range(windows[key])]
            best[key] = min(best[key], (time.perf_counter() - start) / windows[key])
            uploads[key] += [r.num_uploads for r in results if hasattr(r, "num_uploads")]
    return {
        key: Timing(first[key], best[key], float(np.mean(uploads[key])) if uploads[key] else None)
        for key in runs
    }


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def print_table(name: str, timings: dict[str, Timing]) -> None:
    workload = WORKLOADS[name]
    print(
        f"\n{name}: {workload.num_clients} clients × {workload.num_samples} samples × "
        f"{workload.num_features} features, {workload.model}, {workload.dtype}"
    )
    print(f"{'':14}{'s/round':>12}{'× bare':>9}{'rounds/s':>11}{'uploads':>9}{'first round':>13}")
    for key, timing in timings.items():
        uploads = "" if timing.uploads is None else f"{timing.uploads:.2f}"
        print(
            f"{key:14}{timing.seconds:12.6f}{timing.seconds / timings['bare'].seconds:9.2f}"
            f"{1 / timing.seconds:11.1f}{uploads:>9}{timing.first_round:13.4f}"
        )


def sweep_clients(counts: list[int], rounds: int) -> list[dict[str, float]]:
    """Time rounds of ``lean`` for more and more clients of 60 samples, 784→10 softmax.

    The samples of all clients are views of one block of 1000 clients' data: a hundred thousand
    clients would need 19 GB of their own. What a client must own, its mirror and directions, it
    owns, and every gradient is computed.
    """
    block = Workload(1000, 60, 784, "softmax", "float32", window=1, repetitions=1)
    data = make_data(block)
    results = []
    for count in counts:
        repeats = -(-count // block.num_clients)
        problem = make_problem(block, data)
        problem = Problem(
            problem.objective, (problem.clients * repeats)[:count], problem.initial_params
        )
        simulation = FastSimulation(problem, make_recipe("lean"), 0.1 / count)
        first = _seconds(simulation.run_round)
        seconds = min(_seconds(simulation.run_round) for _ in range(rounds))
        results.append(
            {
                "clients": count,
                "first_round_s": first,
                "seconds_per_round": seconds,
                "microseconds_per_client": seconds / count * 1e6,
                "mirrors_gb": count * len(problem.initial_params) * MIRROR_BYTES / 1e9,
                "peak_rss_gb": _peak_rss() / 1e9,
            }
        )
        print("  ".join(f"{key}={value:.4g}" for key, value in results[-1].items()), flush=True)
        del simulation
    return results


def measure_memory(rounds: int) -> dict[str, float]:
    """Run ``lean`` alone on W2; compare the memory it takes with what the clients own."""
    before = _peak_rss()
    workload = WORKLOADS["W2"]
    data = make_data(workload)
    problem = make_problem(workload, data)
    simulation = FastSimulation(problem, make_recipe("lean"), workload.step_size)
    for _ in range(rounds):
        simulation.run_round()
    mirrors = workload.num_clients * len(problem.initial_params) * MIRROR_BYTES
    own = mirrors + data.features.nbytes + data.labels.nbytes
    taken = _peak_rss() - before
    return {"clients_own_gb": own / 1e9, "taken_gb": taken / 1e9, "ratio": taken / own}


def _peak_rss() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def measure_cuda(rounds: int) -> dict[str, float]:
    """Rounds per second of ``lean`` on W4, and the speed of W1 relative to its bare gradient."""
    workload = WORKLOADS["W4"]
    problem = make_problem(workload, make_data(workload))
    simulation = FastSimulation(problem, make_recipe("lean"), workload.step_size, device="cuda")
    for _ in range(20):
        simulation.run_round()
    start = time.perf_counter()
    uploads = upload_bytes = 0
    for _ in range(rounds):
        record = simulation.run_round()
        uploads += record.num_uploads
        upload_bytes += record.upload_bytes
    seconds = time.perf_counter() - start
    timings = measure("W1", ("lean",), "cuda")
    print_table("W1", timings)
    return {
        "w4_rounds": rounds,
        "w4_rounds_per_second": rounds / seconds,
        "w4_uploads": uploads,
        "w4_upload_bytes": upload_bytes,
        "w1_speed_of_bare": timings["bare"].seconds / timings["lean"].seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=4000, help="of W4, with --device cuda")
    parser.add_argument("--clients-sweep", action="store_true")
    parser.add_argument("--clients", default="1000,3000,10000,30000,100000")
    parser.add_argument("--memory", action="store_true", help="of lean on W2, run alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": arguments.device,
    }
    if arguments.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
        result.update(measure_cuda(arguments.rounds))
        print(json.dumps(result))
        return
    if arguments.memory:
        result["memory"] = measure_memory(rounds=3)
        print("  ".join(f"{key}={value:.3f}" for key, value in result["memory"].items()))
    elif arguments.clients_sweep:
        counts = [int(count) for count in arguments.clients.split(",")]
        result["clients_sweep"] = sweep_clients(counts, rounds=3)
    else:
        for name in arguments.workloads.split(","):
            if name not in WORKLOADS:
                raise SystemExit(f"workload {name!r} is not one of {', '.join(WORKLOADS)}")
            timings = measure(name, arguments.recipes.split(","), arguments.device)
            print_table(name, timings)
            result[name] = {key: timing._asdict() for key, timing in timings.items()}
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
