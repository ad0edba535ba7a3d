"""Products of samples with few outputs: NumPy against torch, and what ``aqg`` chooses here.

    OMP_NUM_THREADS=2 PYTHONPATH=src python benchmarks/products.py

It needs NumPy and torch alone. ``forward`` is all clients' ``inputs @ weight``, ``backward`` their
``inputsᵀ @ slopes``, client by client, both through `aqg.objectives.closed_form`; ``bare`` is what
the benchmark of the engine takes for the limit: one forward product over all clients in torch, and
one ``mm`` per client backward. Milliseconds; the libraries take turns, the smallest time counts.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "8")  # as in engine.py

import argparse
import platform
import time
from typing import TYPE_CHECKING

import numpy as np

start = time.perf_counter()
import torch  # noqa: E402

import_seconds = time.perf_counter() - start

from aqg.objectives import closed_form as products  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {  # clients, samples, inputs, outputs
    "W4, softmax": (10, 6000, 784, 10),
    "W1, second layer": (10, 6000, 200, 10),
    "100 clients of MNIST": (100, 600, 784, 10),
}


def contestants(shape: tuple[int, int, int, int], dtype: str) -> dict[str, dict[str, Callable]]:
    num_clients, num_samples, num_inputs, num_outputs = shape
    random = np.random.default_rng(0)
    inputs = random.standard_normal((num_clients, num_samples, num_inputs)).astype(dtype)
    weight = random.standard_normal((num_inputs, num_outputs)).astype(dtype)
    slopes = random.standard_normal((num_clients, num_outputs, num_samples)).astype(dtype)
    gradient = np.empty((num_clients, num_inputs, num_outputs), dtype)
    flat, tensor = torch.from_numpy(inputs).view(-1, num_inputs), torch.from_numpy(inputs)
    rows = torch.from_numpy(slopes)

    def through(library: object, run: Callable) -> Callable:
        def chosen() -> None:
            products._faster_torch = lambda: library
            run()

        return chosen

    def forward() -> None:
        for client in inputs:
            products.narrow_outputs(client, weight)

    def backward() -> None:
        for client in range(num_clients):
            products.narrow_gradient(inputs[client], slopes[client].T, gradient[client])

    return {
        "forward": {
            "NumPy": through(None, forward),
            "torch": through(torch, forward),
            "bare": lambda: flat @ torch.from_numpy(weight),
        },
        "backward": {
            "NumPy": through(None, backward),
            "torch": through(torch, backward),
            "bare": lambda: [torch.mm(a, b) for a, b in zip(rows, tensor, strict=True)],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=10)
    repetitions = parser.parse_args().repetitions
    choice = "NumPy" if products._faster_torch() is None else "torch"
    print(
        f"{platform.platform()}, {torch.get_num_threads()} threads, NumPy {np.__version__}, "
        f"torch {torch.__version__} (imported in {import_seconds:.1f} s); "
        f"clients over {products.LARGE_BYTES >> 20} MB go through {choice} here"
    )
    print(f"{'':32}{'':10}{'NumPy':>9}{'torch':>9}{'bare':>9}{'NumPy/torch':>13}")
    for name, shape in SHAPES.items():
        for dtype in ("float32", "float64"):
            for pass_name, runs in contestants(shape, dtype).items():
                best = dict.fromkeys(runs, float("inf"))
                for _ in range(repetitions):
                    for key, run in runs.items():
                        begin = time.perf_counter()
                        run()
                        best[key] = min(best[key], 1e3 * (time.perf_counter() - begin))
                print(
                    f"{name + ', ' + dtype:32}{pass_name:10}"
                    + "".join(f"{value:9.2f}" for value in best.values())
                    + f"{best['NumPy'] / best['torch']:13.2f}"
                )


if __name__ == "__main__":
    main()
