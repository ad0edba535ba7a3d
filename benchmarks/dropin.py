"""What the two lines cost and save on a Flower app.

python benchmarks/dropin.py apps --runs 5        # whole apps, before and after,
                                                 # into results/apps.jsonl
python benchmarks/dropin.py accuracy --app after --recipe lean    # likewise, with a choice
python benchmarks/dropin.py example              # on the line, and as ``flwr list`` counts
python benchmarks/dropin.py line                 # bytes on the line per message, and their split
python benchmarks/dropin.py overhead             # seconds of mod and wrapper in a round
python benchmarks/dropin.py strategies --runs 5  # strategies of Flower's on digits, by label,
                                                 # into results/strategies.jsonl
python benchmarks/dropin.py large --parameters 100000000 --rounds 2    # time and peak memory

All of it runs on this machine, over real connections between real processes; ``apps`` and
``accuracy`` run the apps' own handlers and strategy in one process, with messages that are
serialized as Flower does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.lab.deployment import Deployment

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
EXAMPLES = ("flower-pytorch", "flower-lora")
PRELOAD = ("torch", "sklearn.datasets", "aqg.flower.compressed", "aqg.flower.mod")


RESNET = "ResNet, batch normalization"
APPS = {"flower-pytorch": 40, "flower-lora": 30, RESNET: 40}
"""What ``apps`` runs, and its rounds; the last is flower-pytorch with another network."""
PARTS = ("apps", "accuracy", "example", "line", "overhead", "large", "strategies")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--example", choices=EXAMPLES, action="append")
    parser.add_argument("--app", choices=("before", "after"), action="append", help="of accuracy")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--recipe", help="of accuracy; the wrapper's own choice by default")
    parser.add_argument("--downlink", help="likewise")
    parser.add_argument("--strategy", default="FedAvg", help="of accuracy, one of Flower's")
    parser.add_argument("--eta", type=float, help="likewise, the server's rate where it has one")
    parser.add_argument("--dirichlet", type=float, default=0.0, help="of accuracy, see the app")
    parser.add_argument("--only", action="append", help="of apps and strategies")
    parser.add_argument("--out", type=Path, help="of apps and strategies")
    parser.add_argument("--parameters", type=int, default=1_000_000)
    options = parser.parse_args()
    options.out = options.out or ROOT / "results" / f"{options.what}.jsonl"
    {
        "apps": measure_apps,
        "accuracy": measure_accuracy,
        "example": measure_examples,
        "line": measure_line,
        "overhead": measure_overhead,
        "large": measure_large,
        "strategies": measure_strategies,
    }[options.what](options)


@contextmanager
def deployed(**options: Any) -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["AQG_STATE_DIR"] = f"{directory}/state"
        path = Path(directory) / "deployment"
        with Deployment(path, preload=PRELOAD, **options) as deployment:
            deployment.start()
            yield deployment


def run(
    deployment: Deployment, app: Path, config: dict[str, Any], counted: list[Any] | None = None
) -> str:
    """Run an app, and return what its server printed; put what Flower counted into a list."""
    before = len(server_log(deployment))
    number = deployment.run(app, config)
    while not (status := deployment.status(number)).startswith("finished"):
        time.sleep(3)
    log = server_log(deployment)
    if status != "finished:completed":
        raise SystemExit(f"run {status}\n{log[-4000:]}")
    if counted is not None:
        traffic = deployment.counted(number)
        counted.append((traffic.up_bytes, traffic.down_bytes))
    return log[before:]


def server_log(deployment: Deployment) -> str:
    """Return what the ServerApp has printed."""
    return deployment.processes.read_log("superlink-worker")


def moved(deployment: Deployment) -> np.ndarray:
    traffic = [deployment.traffic(node) for node in range(len(deployment.nodes))]
    return np.array([sum(t.up_bytes for t in traffic), sum(t.down_bytes for t in traffic)])


# The examples


def measure_examples(options: argparse.Namespace) -> None:
    print("| app | accuracy, last 5 rounds | handed up, down | on the line | by Flower's meter |")
    print("|---|---|---|---|---|")
    for example in options.example or EXAMPLES:
        for name in ("before", "after"):
            accuracies, handed, line, counted = [], [], [], []
            for seed in range(options.runs):
                with deployed() as deployment:
                    start = moved(deployment)
                    config = {"rounds": options.rounds, "num-clients": 3}
                    log = run(deployment, ROOT / "examples" / example / name, config, counted)
                    line.append((moved(deployment) - start) / 3 / options.rounds)
                found = [float(x) for x in re.findall(r"accuracy ([\d.]+)", log)]
                accuracies.append(np.mean(found[-5:]))
                handed.append(handed_bytes(log) / 3 / options.rounds)
                print(f"# {example} {name} {seed}: {accuracies[-1]:.4f}", flush=True)
            flowers = np.array(counted) / 3 / options.rounds
            shown = ", ".join(f"{100 * a:.2f}" for a in accuracies)
            means = (np.mean(sizes, axis=0) / 1000 for sizes in (handed, line, flowers))
            cells = [f"{up:,.1f}, {down:,.1f} kB" for up, down in means]
            print(f"| {example}, {name} | {shown} % | {' | '.join(cells)} |", flush=True)


def handed_bytes(log: str) -> np.ndarray:
    """Return what all rounds handed to Flower, up and down, by the lines of the wrapper."""
    found = re.findall(r"aqg: ([\d.]+) kB up \(of [\d.]+ kB\), ([\d.]+) kB down", log)
    if found:
        return 1000 * np.array(found, np.float64).sum(axis=0)
    sizes = re.findall(r"ArrayRecord \(([\d.]+) MB\)", log)
    rounds = len(re.findall(r"\[ROUND", log))
    return np.array([3 * rounds * float(sizes[0]) * 2**20] * 2)


# Accuracy


def measure_apps(options: argparse.Namespace) -> None:
    """Run apps without the two lines and with them, nothing set.

    Every run is a line of the file, and runs that are there already are not run again.
    """
    logging.disable(logging.CRITICAL)
    options.out.touch()
    rows = read_rows(options.out)
    found = {(row["app"], row["compressed"], row["seed"]) for row in rows}
    apps = options.only or APPS
    for app, seed, compressed in itertools.product(apps, range(options.runs), (False, True)):
        if (app, compressed, seed) in found:
            continue
        options.rounds = APPS[app]
        accuracies, moved = run_app(app, compressed, seed, options)
        row = {"app": app, "seed": seed, "compressed": compressed, "rounds": options.rounds}
        row |= {"accuracies": accuracies, "up": int(moved[0]), "down": int(moved[1])}
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    kept = [row for row in read_rows(options.out) if row["app"] in apps]
    for table in (table_of_apps, table_of_bytes, table_of_beginnings):
        print(*table(kept), "", sep="\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table_of_apps(rows: list[dict[str, Any]]) -> list[str]:
    """Return accuracies in percent: mean, standard deviation, and of each run."""
    lines = ["| app, rounds | stock Flower | the two lines | difference |", "|---|---|---|---|"]
    for app, *both in pairs_of(rows):
        ends = [np.array([100 * last_of(row["accuracies"]) for row in of]) for of in both]
        cells = [
            f"{end.mean():.2f} ± {end.std(ddof=1):.2f} ({', '.join(f'{e:.1f}' for e in end)})"
            for end in ends
        ]
        difference = ends[1] - ends[0]
        error = difference.std(ddof=1) / len(difference) ** 0.5
        cells.append(f"{difference.mean():+.2f} ± {error:.2f}")
        lines.append(f"| {app}, {both[0][0]['rounds']} | {' | '.join(cells)} |")
    return lines


def table_of_bytes(rows: list[dict[str, Any]]) -> list[str]:
    """Return kB per node and round."""
    lines = [
        "| app | stock Flower, kB up, down | the two lines | of stock's |",
        "|---|---|---|---|",
    ]
    for app, *both in pairs_of(rows):
        whole, few = (
            np.mean([[row["up"], row["down"]] for row in of], axis=0) / 3000 / of[0]["rounds"]
            for of in both
        )
        cells = [f"{up:,.1f}, {down:,.1f}" for up, down in (whole, few)]
        cells.append(", ".join(f"1/{ratio:.0f}" for ratio in whole / few))
        lines.append(f"| {app} | {' | '.join(cells)} |")
    return lines


def table_of_beginnings(rows: list[dict[str, Any]]) -> list[str]:
    """Return accuracies on the way, of five rounds each, with standard deviations of the runs."""
    counts = (5, 10, 20, 25)
    lines = [
        f"| app: stock, the two lines | {' | '.join(f'rounds {k - 4} to {k}' for k in counts)} |",
        f"|---|{'---|' * len(counts)}",
    ]
    for app, *both in pairs_of(rows):
        cells = []
        for count in counts:
            found = [[100 * last_of(row["accuracies"][: count + 1]) for row in of] for of in both]
            cells.append(", ".join(f"{np.mean(x):.1f} ± {np.std(x, ddof=1):.1f}" for x in found))
        lines.append(f"| {app} | {' | '.join(cells)} |")
    return lines


def pairs_of(rows: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each app with its runs by seed, those of stock Flower and those with the two lines."""
    for app in sorted({row["app"] for row in rows}, key=list(APPS).index):
        of_app = sorted((row for row in rows if row["app"] == app), key=lambda row: row["seed"])
        yield app, *([r for r in of_app if r["compressed"] is has] for has in (False, True))


def last_of(accuracies: list[float]) -> float:
    return float(np.mean(accuracies[-5:]))


def measure_accuracy(options: argparse.Namespace) -> None:
    logging.disable(logging.CRITICAL)
    print(f"{options.rounds} rounds, 3 nodes; bytes per node and round, the first model included\n")
    print("| app | accuracy, last 5 rounds, each run | mean | up | down |")
    print("|---|---|---|---|---|", flush=True)
    for example in options.example or EXAMPLES:
        for half in options.app or ("before", "after"):
            results = [run_app(example, half == "after", s, options) for s in range(options.runs)]
            accuracies = [last_of(accuracies) for accuracies, _ in results]
            up, down = np.mean([moved for _, moved in results], axis=0) / 3 / options.rounds
            shown = ", ".join(f"{100 * a:.2f}" for a in accuracies)
            cells = f"{up / 1000:,.1f} kB | {down / 1000:,.1f} kB"
            mean = 100 * np.mean(accuracies)
            print(f"| {example}, {half} | {shown} | {mean:.2f} % | {cells} |", flush=True)


def run_app(
    app: str, compressed: bool, seed: int, options: argparse.Namespace
) -> tuple[list[float], Any]:
    """Run an app's own handlers and strategy in this process, with a first model of the seed.

    Returns the accuracy after each round, and the bytes up and down of all messages as Flower
    serializes them, the first model included.
    """
    import contextlib
    import io
    from importlib import import_module

    import torch
    from flwr.app import ArrayRecord, Context, RecordDict
    from flwr.common.serde import message_to_proto
    from flwr.serverapp import strategy as strategies

    from aqg.flower import compressed as strategy
    from aqg.models import DataShape
    from aqg.models.nets import make_resnet8

    from tests.flower.memory_grid import SUPERLINK_NODE, MemoryGrid

    torch.set_num_threads(1)
    example = app if app in EXAMPLES else "flower-pytorch"
    package, rate = {"flower-pytorch": ("digits", 0.05), "flower-lora": ("adapters", 0.2)}[example]
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    sys.path.insert(0, str(ROOT / "examples" / example / ("after" if compressed else "before")))
    client, server = (import_module(f"{package}.{side}_app") for side in ("client", "server"))
    sys.path.pop(0)
    if compressed:
        chosen = {"recipe": options.recipe, "downlink": options.downlink, "seed": seed}
        server.Compressed = lambda inner: strategy.Compressed(inner, **chosen)
    if app == RESNET:
        shape = DataShape((1, 8, 8), (), num_classes=10, num_tokens=0)
        client.Net = server.Net = lambda: make_resnet8(shape, "batch")
    kind, more = getattr(strategies, options.strategy), {"eta": options.eta} if options.eta else {}
    server.FedAvg = lambda **settings: kind(**settings, **more)

    def first_arrays(state: dict[str, torch.Tensor]) -> ArrayRecord:
        """Put the values of each tensor in another order: another draw of the same law."""
        random = torch.Generator().manual_seed(seed)
        orders = {n: torch.randperm(t.numel(), generator=random) for n, t in state.items()}
        return ArrayRecord({n: t.flatten()[orders[n]].view(t.shape) for n, t in state.items()})

    server.ArrayRecord = first_arrays
    config = {"rounds": options.rounds, "num-clients": 3, "local-epochs": 1}
    config |= {"learning-rate": rate, "dirichlet": options.dirichlet}
    moved = np.zeros(2)

    def count(way: int) -> Any:
        def counted(_node: int, message: Any) -> Any:
            if not moved.any():  # the apps seed their first model; samples come in another order
                torch.manual_seed(1000 + seed)
            moved[way] += message_to_proto(message).ByteSize()
            return message

        return counted

    with tempfile.TemporaryDirectory() as directory:
        os.environ["AQG_STATE_DIR"] = directory
        nodes = {100 + m: {"partition-id": m, "num-partitions": 3} for m in range(3)}
        grid = MemoryGrid(client.app, nodes, config, deliver=count(1), answer=count(0))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            server.app(grid, Context(7, SUPERLINK_NODE, {}, RecordDict(), config))
    return [float(x) for x in re.findall(r"accuracy ([\d.]+)", printed.getvalue())], moved


# Bytes on the line


def measure_line(_options: argparse.Namespace) -> None:
    """Count what a message and its reply cost beyond what is in them, by the number of records."""
    app = ROOT / "tests" / "flower" / "dropin_app"
    totals = []
    with deployed() as deployment:
        idle = moved(deployment)
        time.sleep(20)
        idle = (moved(deployment) - idle) / 20
        for rounds in (5, 25):
            start, began = moved(deployment), time.monotonic()
            log = run(deployment, app, {"rounds": rounds, "num-clients": 3, "strategy": "FedAvg"})
            seconds = time.monotonic() - began
            handed = handed_bytes(log)
            totals.append((moved(deployment) - start, seconds, handed))
    (first, first_seconds, first_handed), (last, last_seconds, last_handed) = totals
    # A round is an order to train and one to evaluate for each of three nodes.
    messages = 3 * 2 * 20
    line = (last - first) / messages
    polling = idle * (last_seconds - first_seconds) / messages
    payload = (last_handed - first_handed) / messages
    print("per message and its reply, in bytes:\n")
    print("| | up | down |")
    print("|---|---|---|")
    print(f"| on the line | {line[0]:,.0f} | {line[1]:,.0f} |")
    print(f"| of it polling and heartbeats | {polling[0]:,.0f} | {polling[1]:,.0f} |")
    print(f"| of it our record | {payload[0]:,.0f} | {payload[1]:,.0f} |")
    rest = line - polling - payload
    print(f"| of it Flower's requests | {rest[0]:,.0f} | {rest[1]:,.0f} |")


# Seconds


def measure_overhead(options: argparse.Namespace) -> None:
    """Time mod and wrapper in one process, on a model of some layers."""
    logging.disable(logging.CRITICAL)
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    from aqg.flower import Compressed, aqg_mod

    from tests.flower.memory_grid import MemoryGrid

    size = options.parameters // 10
    spent = {"mod": [], "handler": [], "wrapper": []}

    def timed(message: Any, context: Any, call_next: Any) -> Any:
        started = time.perf_counter()
        reply = aqg_mod(message, context, call_next)
        spent["mod"].append(time.perf_counter() - started - spent["handler"][-1])
        return reply

    app = ClientApp(mods=[timed])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        started = time.perf_counter()
        rng = np.random.default_rng(context.node_id)
        values = {n: a.numpy() for n, a in message.content["arrays"].items()}
        values = {n: v - 0.01 * rng.standard_normal(size, np.float32) for n, v in values.items()}
        content = {"arrays": ArrayRecord({n: Array(v) for n, v in values.items()})}
        content["metrics"] = MetricRecord({"num-examples": 1})
        reply = Message(RecordDict(content), reply_to=message)
        spent["handler"].append(time.perf_counter() - started)
        return reply

    with tempfile.TemporaryDirectory() as directory:
        os.environ["AQG_STATE_DIR"] = directory
        grid = MemoryGrid(app, {n: {"partition-id": n} for n in (1, 2, 3)})
        push, pull = grid.push_messages, grid.pull_messages
        inside = [0.0]

        def watched(call: Any) -> Any:
            def wrapped(*arguments: Any) -> Any:
                started = time.perf_counter()
                result = call(*arguments)
                inside[0] += time.perf_counter() - started
                return result

            return wrapped

        grid.push_messages, grid.pull_messages = watched(push), watched(pull)
        nodes = {"min_train_nodes": 3, "min_available_nodes": 3, "fraction_evaluate": 0.0}
        strategy = Compressed(FedAvg(**nodes))
        from aqg.flower import grid as grids

        send = grids.CompressedGrid.send_and_receive

        def timed_send(self: Any, messages: Any, **more: Any) -> Any:
            inside[0], started = 0.0, time.perf_counter()
            replies = send(self, messages, **more)
            spent["wrapper"].append(time.perf_counter() - started - inside[0])
            return replies

        grids.CompressedGrid.send_and_receive = timed_send  # type: ignore[method-assign]
        layers = {f"layer{i}": Array(np.ones(size, np.float32)) for i in range(10)}
        strategy.start(grid, ArrayRecord(layers), num_rounds=8)
    trained = [s for s in spent["wrapper"] if s > 0.001]
    print(f"{options.parameters:,} parameters, 3 nodes, medians of rounds 3 to 8:")
    print(f"mod {np.median(spent['mod'][6:]):.3f} s per node")
    print(f"wrapper {np.median(trained[2:]):.3f} s per round")
    # The whole round on real processes, with a persistent worker and shorter waits.
    app = ROOT / "tests" / "flower" / "dropin_app"
    with deployed() as deployment:
        for compressed in (False, True):
            config = {"rounds": 5, "num-clients": 3, "size": options.parameters}
            log = run(deployment, app, {**config, "compressed": compressed})
            times = [float(found) for found in re.findall(r"round \d+ at ([\d.]+)", log)]
            seconds = np.median(np.diff(times)[1:])
            print(f"compressed {compressed}: {seconds:.2f} s per round", flush=True)


# Large models


def measure_large(options: argparse.Namespace) -> None:
    """Train one node on a large model, without the two lines and with them."""
    app = ROOT / "tests" / "flower" / "dropin_app"
    vector = 4 * options.parameters
    print(f"{options.parameters:,} parameters ({vector / 1e6:,.0f} MB), one node")
    print("peak memory in vectors of the model; what a round takes includes evaluation\n")
    print("| | seconds a round | sent | received | ServerApp | ClientApp | SuperLink | SuperNode |")
    print("|---|---|---|---|---|---|---|---|")
    for compressed in (False, True):
        with deployed(num_nodes=1) as deployment:
            config = {"rounds": options.rounds, "num-clients": 1, "size": options.parameters}
            log = run(deployment, app, {**config, "compressed": compressed, "timeout": 900})
            client = deployment.processes.read_log("node0-worker")
            traffic = moved(deployment) / 1e6
            found = [
                peak_memory(deployment.processes.process_of(name))
                for name in ("superlink", "node0")
            ]
        times = [float(at) for at in re.findall(r"round \d+ at ([\d.]+)", log)]
        peaks = [max(map(int, re.findall(r"peak memory (\d+)", text))) for text in (log, client)]
        cells = [f"{peak / 1e9:.2f} GB, {peak / vector:.1f}" for peak in (*peaks, *found)]
        seconds = ", ".join(f"{s:.0f}" for s in np.diff(times))
        sizes = f"{traffic[0]:,.1f} MB | {traffic[1]:,.1f} MB"
        name = "the two lines" if compressed else "stock"
        print(f"| {name} | {seconds} | {sizes} | {' | '.join(cells)} |", flush=True)


def peak_memory(process: int | None) -> int:
    """Return the most memory that a process has held, in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


# Strategies


def measure_strategies(options: argparse.Namespace) -> None:
    """Train digits by label under strategies of Flower's, without the two lines and with them.

    Every run is a line of the file, and runs that are there already are not run again.
    """
    from benchmarks.digits_by_label import STRATEGIES, train

    options.out.touch()
    rows = read_rows(options.out)
    found = {(r["strategy"], r["lines"], r["seed"], r["rounds"]): r for r in rows}
    for name, lines, seed in itertools.product(
        options.only or STRATEGIES, (False, True), range(options.runs)
    ):
        key = name, lines, seed, options.rounds
        if key not in found:
            accuracy, (up, down) = train(*key[:1], lines, seed, options.rounds, options.recipe)
            row = {"strategy": name, "lines": lines, "seed": seed, "rounds": options.rounds}
            found[key] = row | {"accuracy": accuracy, "up": float(up), "down": float(down)}
            with options.out.open("a") as file:
                file.write(json.dumps(found[key]) + "\n")
    print(
        f"{options.rounds} rounds; accuracy in percent, mean over the last 5 rounds, of each seed"
    )
    print("| strategy | stock Flower | the two lines | difference | up, down, of stock's |")
    print("|---|---|---|---|---|")
    for name in options.only or STRATEGIES:
        stock, ours = (
            [found[name, lines, seed, options.rounds] for seed in range(options.runs)]
            for lines in (False, True)
        )
        of = [np.array([100 * row["accuracy"] for row in rows]) for rows in (stock, ours)]
        shown = [f"{a.mean():.1f} ({', '.join(f'{v:.1f}' for v in a)})" for a in of]
        error = (of[1] - of[0]).std(ddof=1) / len(ours) ** 0.5 if len(ours) > 1 else math.nan
        difference = f"{(of[1] - of[0]).mean():+.1f} ± {error:.1f}"
        up, down = (1 / np.mean([row[way] for row in ours]) for way in ("up", "down"))
        print(f"| {name} | {' | '.join(shown)} | {difference} | 1/{up:.0f}, 1/{down:.0f} |")


if __name__ == "__main__":
    main()
