"""What a deployment on Flower costs: seconds per round, bytes on the line, memory.

python benchmarks/flower.py latency          # stock Flower, a persistent worker, shorter waits
python benchmarks/flower.py bytes            # frames, connections and the loopback interface
python benchmarks/flower.py example          # examples/flower-pytorch, before, and our own server
python benchmarks/flower.py large            # an upload of 100 million parameters
python benchmarks/flower.py memory           # what the server holds per client

All of it runs on this machine, over real connections. ``bytes`` reads packets off the loopback
interface, which takes root; without it, the last columns are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.downlink import resolve_downlink
from aqg.core.recipes import make_recipe
from aqg.core.server import Step
from aqg.protocol.messages import ClientMirror, find_base, fingerprint
from aqg.protocol.server import MirrorBook
from aqg.runs.table import format_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.lab.deployment import Deployment
from tests.lab.watch import APP, PRELOAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.lab.deployment import ConfigValue


EXAMPLE = Path(__file__).parents[1] / "examples" / "flower-pytorch"
LARGE_APP = Path(__file__).parent / "flower_large"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("latency", "bytes", "example", "large", "memory"))
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--recipe", help="lean by default, and auto for example")
    parser.add_argument("--downlink", default="auto", help="full, exact, condensed or auto")
    parser.add_argument("--clients", type=int, default=100, help="of memory")
    parser.add_argument("--app", choices=("before", "own-server"), help="only one half of example")
    parser.add_argument("--parameters", type=int, default=100_000_000)
    options = parser.parse_args()
    if options.recipe is None:
        options.recipe = "auto" if options.what == "example" else "lean"
    {
        "latency": measure_latency,
        "bytes": measure_bytes,
        "example": measure_example,
        "large": measure_large,
        "memory": measure_memory,
    }[options.what](options)


@contextmanager
def deployed(**options: Any) -> Iterator[Deployment]:
    """Start a deployment in a directory that goes with it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with Deployment(path / "deployment", **options) as deployment:
            deployment.start()
            yield deployment


def train(
    deployment: Deployment, app: Path, config: Mapping[str, ConfigValue]
) -> list[dict[str, Any]]:
    """Run an app that is built on aqg, and return its rounds."""
    directory = deployment.directory.parent / "run"
    settings = {"num-clients": len(deployment.nodes), "run-dir": str(directory), **config}
    run = deployment.run(app, settings)
    wait(deployment, run)
    lines = (directory / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def wait(deployment: Deployment, run: int) -> None:
    """Wait for a run, looking seldom: every look costs CPU that the run needs."""
    while not (status := deployment.status(run)).startswith("finished"):
        time.sleep(3)
    if status != "finished:completed":
        log = deployment.processes.read_log("superlink-worker")
        raise SystemExit(f"run {status}\n{log[-4000:]}")


# Seconds per round


def measure_latency(options: argparse.Namespace) -> None:
    ways = {
        "stock Flower": {"worker": False, "quick": False},
        "persistent worker": {"quick": False},
        "and shorter waits": {},
    }
    print(f"{options.nodes} nodes, {options.rounds} rounds on digits, in seconds\n")
    print("| | fastest round | median round | of it the clients' own work |")
    print("|---|---|---|---|")
    for name, way in ways.items():
        with deployed(num_nodes=options.nodes, preload=PRELOAD, **way) as deployment:
            config = {"num-server-rounds": options.rounds, "recipe": options.recipe}
            rows = train(deployment, APP, config)
        rounds = [row["round_seconds"] for row in rows[1:]]
        work = median([row["work_seconds"] for row in rows[1:]])
        print(f"| {name} | {min(rounds):.2f} | {median(rounds):.2f} | {work:.2f} |", flush=True)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


# Bytes


class Sniffer:
    """Counts the bytes of IP packets on the loopback interface, by port and direction."""

    _OUTGOING = 4
    _ALL = 0x0003

    def __init__(self) -> None:
        self.to_port: Counter[int] = Counter()
        self.from_port: Counter[int] = Counter()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(self._ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.settimeout(0.2)
        self._socket.bind(("lo", 0))
        self._running = True
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def close(self) -> None:
        self._running = False
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while self._running:
            try:
                packet, address = self._socket.recvfrom(128)
            except TimeoutError:
                continue
            if address[2] == self._OUTGOING:  # every packet is seen twice: leaving and arriving
                continue
            version, protocol = packet[14] >> 4, packet[23]
            if version != 4 or protocol != socket.IPPROTO_TCP:
                continue
            start = 14 + 4 * (packet[14] & 15)
            source, target = struct.unpack("!HH", packet[start : start + 4])
            (length,) = struct.unpack("!H", packet[16:18])
            self.from_port[source] += length
            self.to_port[target] += length


def measure_bytes(options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        sniffer = _try_to_sniff(stack)
        deployment = stack.enter_context(
            deployed(num_nodes=options.nodes, preload=PRELOAD, quick=False)
        )
        ports = [node.link_port for node in deployment.nodes]
        track = deployment.processes.process_of("superlink")

        def now() -> np.ndarray:
            traffic = _traffic(deployment, sniffer, ports)
            return np.array([time.monotonic(), cpu_seconds(track), *traffic])

        idle = now()
        time.sleep(15)
        rates = (now() - idle)[1:] / 15
        directory = deployment.directory.parent / "run"
        settings = {"num-clients": options.nodes, "run-dir": str(directory)}
        settings |= {"num-server-rounds": options.rounds, "recipe": options.recipe}
        settings["downlink"] = options.downlink
        deployment.run(APP, settings)
        wait_for_round(directory, 2)  # the app itself has been sent to the nodes by then
        begin, requests = now(), Requests()
        deployment.meter.watch = requests.count
        rows = wait_for_round(directory, options.rounds)
        spent = now() - begin
        deployment.meter.watch = None
    messages = (options.rounds - 2) * options.nodes
    payloads = [sum(row[name] for row in rows[2:]) for name in ("upload_bytes", "download_bytes")]
    cpu, *moved = spent[1:] - rates * spent[0]
    print(f"{messages} messages to {options.nodes} nodes and back, downlink {options.downlink}\n")
    print("| bytes per message | frame | on the connection | on the loopback interface |")
    print("|---|---|---|---|")
    for index, name in enumerate(("sent by a node", "received by a node")):
        frame = f"{payloads[index] / messages:.0f}"
        cells = " | ".join(
            f"{moved[place] / messages:,.0f}" for place in range(index, len(moved), 2)
        )
        print(f"| {name} | {frame} | {cells} |")
    print("\n| sent by a node, per message | requests | bytes | of them payload |")
    print("|---|---|---|---|")
    for path in sorted(requests.counts):
        count, size, body = requests.counts[path], requests.sizes[path], requests.bodies[path]
        per = [f"{count / messages:.1f}", *(f"{x / messages:,.0f}" for x in (size, body))]
        print(f"| {path} | {' | '.join(per)} |")
    print(f"\nCPU of the SuperLink: {1e3 * cpu / messages:.0f} ms per message and its reply")
    idling = ", ".join(f"{rate / options.nodes:.0f}" for rate in rates[1:])
    print(
        "taken off: what an idle node costs in a second, namely "
        f"{1e3 * rates[0] / options.nodes:.1f} ms of that CPU and {idling} bytes "
        "(up and down; connection, then interface)"
    )


class Requests:
    """Counts the requests of all nodes, and their bytes, by what they ask for."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()
        self.bodies: Counter[str] = Counter()
        self._current: dict[int, str] = {}

    def count(self, _name: str, connection: int, data: bytes) -> None:
        """Take note of what a node sends on a connection: heads of requests, or bodies."""
        for found in re.finditer(rb"POST (\S+) HTTP.*?\r\n\r\n", data, re.DOTALL):
            path = found[1].decode().rpartition("/")[2]
            self._current[connection] = path
            self.counts[path] += 1
            length = re.search(rb"content-length: (\d+)", found[0], re.IGNORECASE)
            self.bodies[path] += int(length[1]) if length else 0
        self.sizes[self._current.get(connection, "other")] += len(data)


def cpu_seconds(process: int | None) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_round(directory: Path, number: int) -> list[dict[str, Any]]:
    """Wait until a round is written, and return all up to it."""
    path = directory / "rounds.jsonl"
    while True:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= number:
            return [json.loads(line) for line in lines[:number]]
        time.sleep(0.05)


def _try_to_sniff(stack: ExitStack) -> Sniffer | None:
    try:
        sniffer = Sniffer()
    except PermissionError:
        print("no permission to read packets: the interface is left out")
        return None
    stack.callback(sniffer.close)
    return sniffer


def _traffic(deployment: Deployment, sniffer: Sniffer | None, ports: list[int]) -> list[float]:
    nodes = [deployment.traffic(node) for node in range(len(deployment.nodes))]
    counts: list[float] = [sum(n.up_bytes for n in nodes), sum(n.down_bytes for n in nodes)]
    if sniffer:
        counts += [sum(sniffer.to_port[port] for port in ports)]
        counts += [sum(sniffer.from_port[port] for port in ports)]
    return counts


# The example


def measure_example(options: argparse.Namespace) -> None:
    print(f"{options.nodes} nodes, {options.rounds} rounds; bytes per node and round\n", flush=True)
    print("| app | accuracy, last 5 rounds | payload sent | payload received | sent | received |")
    print("|---|---|---|---|---|---|")
    config: dict[str, ConfigValue] = {"num-clients": options.nodes}
    preload = ("torch", "sklearn.datasets", "aqg.flower")
    for name in (options.app,) if options.app else ("before", "own-server"):
        with ExitStack() as stack:
            sniffer = _try_to_sniff(stack)
            deployment = stack.enter_context(deployed(num_nodes=options.nodes, preload=preload))
            ports = [node.link_port for node in deployment.nodes]
            start = _traffic(deployment, sniffer, ports)
            if name == "before":
                wait(
                    deployment, deployment.run(EXAMPLE / name, {**config, "rounds": options.rounds})
                )
                log = deployment.processes.read_log("superlink-worker")
                accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", log)]
                payloads = [plain_upload_bytes()] * 2
            else:
                more = {"recipe": options.recipe, "downlink": options.downlink}
                more |= {"num-server-rounds": options.rounds, "trust-partition-id": True}
                rows = train(deployment, EXAMPLE / name, {**config, **more})
                accuracies = [row["test_accuracy"] for row in rows if "test_accuracy" in row]
                shares = options.nodes * len(rows)
                payloads = [
                    round(sum(row[name] for row in rows) / shares)
                    for name in ("upload_bytes", "download_bytes")
                ]
            moved = np.array(_traffic(deployment, sniffer, ports)) - np.array(start)
        accuracy = sum(accuracies[-5:]) / len(accuracies[-5:])
        cells = [f"{payload:,} B" for payload in payloads]
        # On the interface where it could be read, else on the connections.
        cells += [format_bytes(round(m / options.nodes / options.rounds)) for m in moved[-2:]]
        label = name if name == "before" else f"{name}, {options.recipe}, {options.downlink}"
        print(f"| {label} | {accuracy:.2%} | {' | '.join(cells)} |", flush=True)


def plain_upload_bytes() -> int:
    """Return the length of the arrays in a plain upload: the model as Flower packs it."""
    import sys

    from flwr.app import ArrayRecord

    sys.path.insert(0, str(EXAMPLE / "before"))
    from digits.task import Net

    return sum(len(array.data) for array in ArrayRecord(Net().state_dict()).values())


# A large model


def measure_large(options: argparse.Namespace) -> None:
    with deployed(num_nodes=1, preload=PRELOAD) as deployment:
        started = time.monotonic()
        rows = train(
            deployment,
            LARGE_APP,
            {
                "num-server-rounds": 2,
                "recipe": options.recipe,
                "downlink": options.downlink,
                "parameters": options.parameters,
                "round-timeout": 600.0,
                "trust-partition-id": True,
            },
        )
        seconds = time.monotonic() - started
        logs = [deployment.processes.read_log(f"{name}-worker") for name in ("superlink", "node0")]
        peaks = {
            name: peak_memory(deployment.processes.process_of(name))
            for name in ("superlink", "node0")
        }
        traffic = deployment.traffic(0)
    peaks["ServerApp"], peaks["ClientApp"] = (
        max(int(found) for found in re.findall(r"peak memory (\d+)", log)) for log in logs
    )
    vector = 4 * options.parameters
    print(f"{options.parameters:,} parameters ({format_bytes(vector)}), {options.recipe}\n")
    for row in rows:
        print(
            f"round {row['round']}: width {row['widths'][0]}, frame "
            f"{format_bytes(row['upload_bytes'])}, {row['round_seconds']:.0f} s "
            f"({row['work_seconds']:.0f} s of work)"
        )
    print(
        f"all in {seconds:.0f} s; sent {format_bytes(traffic.up_bytes)}, "
        f"received {format_bytes(traffic.down_bytes)}"
    )
    print("\n| process | peak memory | in vectors of the model |")
    print("|---|---|---|")
    for name, peak in peaks.items():
        print(f"| {name} | {format_bytes(peak)} | {peak / vector:.1f} |")


def peak_memory(process: int | None) -> int:
    """Return the most memory that a process has held, in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


# Memory per client


def measure_memory(options: argparse.Namespace) -> None:
    """Take in one upload from each of many clients, and see what the process grows by."""
    recipe, num_params = make_recipe(options.recipe), options.parameters
    num_clients = options.clients
    downlink = resolve_downlink(options.downlink, recipe)
    start = np.zeros(num_params, np.float32)
    book = MirrorBook.first(recipe, start, np.ones(num_clients), Step(1.0, downlink=downlink))
    mark = fingerprint(recipe, num_params, "float32", 0)
    about = {"recipe": options.recipe, "bits": 4, "max_staleness": 100, "seed": 0}
    # All start from the same mirror of zeros, so that one upload does for all.
    order = book.order(0, run="memory", incarnation=1, fingerprint=mark, **about)
    gradient = np.random.default_rng(0).standard_normal(num_params, np.float32)
    base = find_base(recipe, ClientMirror.first(recipe, num_params, "float32"), order, 1)
    assert base is not None
    _, reply = base.answer(recipe, order, gradient)
    del base, gradient
    resident, seconds, frame_bytes = [], [], len(reply.frame)
    for client in range(num_clients):
        started = time.perf_counter()
        taken = book.accept(client, replace(reply, loss=0.0), 1)
        seconds.append(time.perf_counter() - started)
        assert not isinstance(taken, str), taken
        del taken
        resident.append(resident_bytes())
    half = num_clients // 2
    per_client = max(0.0, (resident[-1] - resident[half]) / (num_clients - half - 1))
    print(f"{num_params:,} parameters, float32, {options.recipe}\n")
    print(
        f"measured: {format_bytes(round(per_client))} of server memory per client, "
        f"{per_client / num_params:.2f} B per parameter; {median(seconds) * 1e3:.2f} ms to take in "
        f"an upload of {format_bytes(frame_bytes)}; {num_clients:,} clients took "
        f"{format_bytes(resident[-1] - resident[0])}"
    )
    print("\n| nodes | server memory for mirrors | time to take in a round, one core |")
    print("|---|---|---|")
    for nodes in (10, 1_000, 100_000):
        memory, time_taken = format_bytes(round(per_client * nodes)), median(seconds) * nodes
        print(f"| {nodes:,} | {memory} | {time_taken:.2g} s |")
    print("\nThe table is computed: what was measured, times the number of nodes.")


def resident_bytes() -> int:
    """Return the memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
