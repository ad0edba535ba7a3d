"""Seconds per round of the fast simulator, against the bare gradient and other simulators.

    python benchmarks/engine.py                            # W1..W4, some minutes
    python benchmarks/engine.py --peers none               # without other simulators
    python benchmarks/engine.py --workloads W3 --json      # one of them, for machines
    python benchmarks/engine.py --clients-sweep            # 1,000 to 100,000 clients
    python benchmarks/engine.py --memory                   # of W2
    python benchmarks/engine.py --senders                  # everyone sends, a tenth, none
    python benchmarks/engine.py --senders --against DIR    # the same beside another checkout
    python benchmarks/engine.py --device cuda              # on a GPU

====  =======  =======  ========  ====================  =========
name  clients  samples  features  model                 precision
====  =======  =======  ========  ====================  =========
W1    10       6000     784       784-200-10 network    float32
W2    1000     60       784       784-200-10 network    float32
W3    18       128      34        logistic regression   float64
W4    10       6000     784       784→10 softmax        float32
====  =======  =======  ========  ====================  =========

The data is synthetic: Gaussian noise around one center per class. W3 has as many samples in all as
the paper's three sets have when each is cut into six equal parts (267, 58 and 59). ``bare``
computes every client's loss and gradient in batched torch and does nothing else: no server, no
compression, no bytes; for W3 there is the same in stacked NumPy. A round of the engine includes
everything, the exact length of every frame too.

All contestants take turns, window by window, so that noise hits them alike; a window is a few
rounds, and the smallest mean over a window is reported. The first rounds, in which all clients
upload, come before and are reported apart. Peers (FedJAX, pfl, FedLab and Flower's simulation) take
part where they are installed; they compute one full-batch step per client, with no compression.
Flower runs in a process of its own, after the others.

Under a lazy recipe hardly anyone uploads once the first rounds are over, while the peers aggregate
every client in every round. ``--senders`` therefore sets who sends: everyone, a tenth of the
clients, or none; the recipe's policy still chooses the widths. ``--against`` runs the sources of
another checkout in turns with these and prints the ratio of the times, and says so where the two
sent different numbers of bytes.
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
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from engine_bare import bare_gradient, numpy_gradient
from engine_senders import as_json, measure_senders, print_senders
from engine_workloads import WORKLOADS, Data, Workload, make_data, make_problem

from aqg.core.recipes import make_recipe
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RECIPES = ("gd", "laq", "aqg-2", "lean")
SENDING_RECIPES = ("gd", "laq", "lean")
PEERS = ("FedJAX", "pfl", "FedLab", "Flower")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""On a machine that others use, with one thread, the time that the process had a core is fairer."""
WARM_UP_ROUNDS = 2
LONGEST_WINDOW = 2.0
"""Seconds: slow contestants do fewer rounds in a window."""
LONGEST_TURNS = 20.0
"""Seconds: very slow ones take fewer turns, but two at least."""
FLOWER_ROUNDS = {"W1": 4, "W2": 2, "W3": 20, "W4": 6}
FLOWER_SECONDS = 300
MIRROR_BYTES = 4 + 1
"""Per parameter and client: the mirror in float32, and the direction it last went, in int8."""


class Timing(NamedTuple):
    """What a contestant took, in seconds per round; uploads are per round, all clients together."""

    first_round: float
    seconds: float
    uploads: float | None


def contestants(
    workload: Workload, data: Data, recipes: Sequence[str], peers: Sequence[str]
) -> dict[str, Callable[[], Any]]:
    problem = make_problem(workload, data)
    found: dict[str, Callable[[], Any]] = {"bare": bare_gradient(workload, problem, data, "cpu")}
    if workload.model == "logistic":
        found["bare (NumPy)"] = numpy_gradient(problem, data)
    for recipe in recipes:
        simulation = FastSimulation(problem, make_recipe(recipe), workload.step_size)
        found[recipe] = simulation.run_round
    if peers:
        from engine_peers import installed_peers

        found.update(installed_peers(workload, data, peers))
    return found


def measure(
    name: str,
    recipes: Sequence[str],
    peers: Sequence[str] = (),
    clock: Callable[[], float] = time.perf_counter,
    num_samples: int | None = None,
) -> dict[str, Timing]:
    workload = WORKLOADS[name]
    if num_samples is not None:
        workload = workload._replace(num_samples=num_samples)
    data = make_data(workload)
    runs = contestants(workload, data, recipes, peers)
    first = {key: _seconds(run) for key, run in runs.items()}
    windows, turns = {}, {}
    for key, run in runs.items():
        warm = min(_seconds(run) for _ in range(WARM_UP_ROUNDS))
        windows[key] = max(1, min(workload.window, round(LONGEST_WINDOW / warm)))
        turns[key] = max(2, min(workload.repetitions, round(LONGEST_TURNS / warm)))
    best = dict.fromkeys(runs, float("inf"))
    uploads: dict[str, list[int]] = {key: [] for key in runs}
    for turn in range(workload.repetitions):
        for key, run in runs.items():
            if turn >= turns[key]:
                continue
            start = clock()
            results = [run() for _ in range(windows[key])]
            best[key] = min(best[key], (clock() - start) / windows[key])
            uploads[key] += [r.num_uploads for r in results if hasattr(r, "num_uploads")]
    timings = {
        key: Timing(first[key], best[key], float(np.mean(uploads[key])) if uploads[key] else None)
        for key in runs
    }
    if "Flower" in peers and (flower := measure_flower(name)) is not None:
        timings["Flower"] = flower
    return timings


def measure_flower(name: str) -> Timing | None:
    """Run Flower's simulation in a process of its own; None where it is missing or fails."""
    script = os.path.join(os.path.dirname(__file__), "engine_flower.py")
    command = [sys.executable, script, name, "--rounds", str(FLOWER_ROUNDS[name])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FLOWER_SECONDS, check=False
        )
        result = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        print(f"Flower is left out: {type(error).__name__}", file=sys.stderr)
        return None
    if "error" in result:
        print(f"Flower is left out: {result['error']}", file=sys.stderr)
        return None
    return Timing(result["first_round"], result["seconds"], None)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def print_table(name: str, timings: dict[str, Timing], num_samples: int | None = None) -> None:
    workload = WORKLOADS[name]
    num_samples = num_samples or workload.num_samples
    print(
        f"\n{name}: {workload.num_clients} clients × {num_samples} samples × "
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--recipes", help=f"{','.join(RECIPES)} by default")
    parser.add_argument("--senders", action="store_true", help="everyone sends, a tenth, none")
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="with --senders: another checkout"
    )
    parser.add_argument(
        "--num-clients", type=int, help="with --senders: in place of the workload's"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="with --senders: turns")
    parser.add_argument("--peers", default=",".join(PEERS), help="some of these, or none")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--samples", type=int, help="of each client, in place of the workload's")
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    parser.add_argument("--rounds", type=int, default=4000, help="with --device cuda")
    parser.add_argument("--clients-sweep", action="store_true")
    parser.add_argument("--clients", default="1000,3000,10000,30000,100000")
    parser.add_argument("--memory", action="store_true", help="of lean on W2, run alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    names = arguments.workloads.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise SystemExit(f"workload {name!r} is not one of {', '.join(WORKLOADS)}")
    if arguments.against is not None and not arguments.senders:
        raise SystemExit("--against needs --senders")
    result: dict[str, Any] = {
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": arguments.device,
    }
    if arguments.device == "cuda":
        from engine_cuda import measure_cuda

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
    elif arguments.senders:
        recipes = (arguments.recipes or ",".join(SENDING_RECIPES)).split(",")
        for name in names:
            num_clients = arguments.num_clients or WORKLOADS[name].num_clients
            sending = measure_senders(
                name,
                recipes,
                num_clients,
                arguments.against,
                arguments.clock,
                arguments.repetitions,
            )
            print_senders(name, num_clients, sending, arguments.clock)
            result[name] = as_json(sending)
    else:
        for name in names:
            peers = () if arguments.peers == "none" else tuple(arguments.peers.split(","))
            recipes = (arguments.recipes or ",".join(RECIPES)).split(",")
            clock = CLOCKS[arguments.clock]
            timings = measure(name, recipes, peers, clock, arguments.samples)
            print_table(name, timings, arguments.samples)
            result[name] = {key: timing._asdict() for key, timing in timings.items()}
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
