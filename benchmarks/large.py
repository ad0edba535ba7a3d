"""A large model: peak memory and seconds of the two lines beside stock Flower, and of every step.

python benchmarks/large.py                           # into results/large.md
python benchmarks/large.py app --params 1e7          # ServerApp and ClientApp, with and without
python benchmarks/large.py channel --params 1e9      # the channel alone, without a framework

``app``: ServerApp and ClientApp are processes of their own that hand each other Flower's messages;
two nodes, FedAvg, models that differ by noise. ``channel``: server and one client in one process,
the client's memory on disk. It needs neither Flower nor torch; with 1e9 parameters, five models of
4 GB of memory and one of disk. All memory is what the system says of the process (Linux), in models
of 32 bits per parameter.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import re
import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aqg.channel.client import CopyStore
    from aqg.protocol.messages import Order
    from aqg.protocol.store import ClientStore

LAYERS = 20
NODES = 2
STOCK, COMPRESSED = "stock Flower", "the two lines"
RESULTS = Path(__file__).parents[1] / "results" / "large.md"
Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("app", "channel"))
    parser.add_argument("--params", type=lambda text: int(float(text)), help="1e8 by default")
    parser.add_argument("--rounds", type=int, help="4 of apps, 2 of the channel by default")
    parser.add_argument("--recipe", default="auto", help="of the channel")
    options = parser.parse_args()
    size = options.params or 10**8
    if size < LAYERS * 1000 or (options.rounds or 2) < 2:
        parser.error(f"at least {LAYERS * 1000} parameters and 2 rounds")
    if options.what == "app":
        print(compare_apps(size, options.rounds or 4))
    elif options.what == "channel":
        print(measure_channel(size, options.rounds or 2, options.recipe))
    else:
        text = [
            "# Large models",
            "",
            "What the [two lines](../docs/how-to/flower.md) cost beside stock Flower, and the "
            "steps of the channel under them (`python benchmarks/large.py`, two busy x86 cores). "
            "Memory is the most that a process held, in models of 32 bits per parameter; stock "
            "Flower's processes do not load `aqg`, whose libraries take 130 MB.",
            "",
            *(compare_apps(size // part, options.rounds or 4) for part in (10, 1)),
            measure_channel(size, options.rounds or 2, options.recipe),
        ]
        _, *larger = RESULTS.read_text().partition("## Larger ones\n")  # written by hand
        RESULTS.write_text("\n".join([*text, "".join(larger)]))


def memory(kind: str = "VmRSS") -> int:
    """Return the bytes that this process holds, or with ``VmHWM`` has held at most."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


# The channel


class Step(NamedTuple):
    """What a step took; bytes of its side, before it and at its peak."""

    name: str
    seconds: float
    held: int
    peak: int


class Meter:
    """Measures steps one after the other; what is held by now counts for none of them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.base = memory()
        """What is held of others than the side whose steps these are."""

    def time(self, name: str, work: Callable[[], Result]) -> Result:
        """Do something, and note what it takes."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before, begun = memory(), time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begun
        step = Step(name, seconds, before - self.base, memory("VmHWM") - self.base)
        self.steps.append(step)
        print(f"{name}: {seconds:.2f} s, {step.held:,} bytes, at most {step.peak:,}", flush=True)
        return result


class Notes:
    """A client's memory on disk, as of the adapters."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def terms(self) -> list[Order]:
        found = self.copies("large").terms()
        return [] if found is None else [found]

    def copies(self, run: str) -> CopyStore:
        from aqg.channel.client import CopyStore
        from aqg.protocol.store import DirectoryVault

        return CopyStore(DirectoryVault(self._directory / "copy"), run)

    def mirrors(self, run: str, fingerprint: bytes, layout: bytes) -> ClientStore:  # noqa: ARG002
        from aqg.protocol.store import ClientStore, DirectoryVault

        return ClientStore(DirectoryVault(self._directory / "mirror"), run)


def make_model(size: int) -> dict[str, np.ndarray]:
    """Return a model of some large tensors."""
    random = np.random.default_rng(0)
    return {f"layer{k}": random.standard_normal(size // LAYERS, np.float32) for k in range(LAYERS)}


def train(values: Any, number: int) -> dict[str, np.ndarray]:
    """Return a model that training has moved, tensor by tensor."""
    random, trained = np.random.default_rng(number), {}
    for name, tensor in values.items():
        trained[name] = random.standard_normal(tensor.shape, np.float32)
        trained[name] *= np.float32(0.01)
        trained[name] += tensor
    return trained


def run_channel(
    size: int, rounds: int, recipe: str, directory: Path
) -> tuple[list[Step], int, int]:
    """Return the steps of the last round, and the lengths of its messages."""
    from aqg.channel.client import receive, reply_to
    from aqg.channel.server import Channel
    from aqg.channel.settings import make_settings

    meter = Meter()
    model, notes = make_model(size), Notes(directory)
    channel = Channel("large", model, make_settings(recipe))
    own = meter.base
    for number in range(1, rounds + 1):
        print(f"round {number}")
        meter.steps.clear()
        phase = meter.time("server: publish", lambda m=model: channel.publish(m, is_train=True))
        order, is_full = meter.time("server: order", lambda: channel.order(1, evaluate=False))
        whole = dict(channel.copied()) if is_full else None
        meter.base = memory()
        given = [meter.time("client: receive", lambda o=order, w=whole: receive(o, w, notes))]
        given.append(train(given[0].values, number))
        part = meter.time(
            "client: reply", lambda g=given: reply_to(held=g.pop(0), after=g.pop(), memory=notes)
        )
        del whole
        meter.base = own
        taken = meter.time("server: take", lambda p=phase, r=part: channel.take(1, p, r))
        model = meter.time("server: the reply as a model", lambda t=taken: dict(t.tensors()))
        meter.time("server: commit", taken.commit)
        sizes = len(order), len(part)
        del taken, phase, order, part
    return meter.steps, *sizes


def measure_channel(size: int, rounds: int, recipe: str) -> str:
    """Return a table of the steps of the last round."""
    with tempfile.TemporaryDirectory() as directory:
        run_channel(LAYERS * 1000, 3, recipe, Path(directory) / "small")  # loads what is compiled
        run_channel(LAYERS * 1000, 3, recipe, Path(directory) / "again")
        steps, down, up = run_channel(size, rounds, recipe, Path(directory) / "run")
    model = 4 * size
    lines = [
        "",
        f"## Steps of a round with {size:,} parameters",
        "",
        f"Recipe `{recipe}`, {LAYERS} tensors, one client, round {rounds}: {down / 1e6:.1f} MB "
        f"down and {up / 1e6:.1f} MB up, where plain copies are {model / 1e6:,.0f} MB each "
        "(`python benchmarks/large.py channel`). What the server holds at first is the strategy's "
        "model, the model of the round before and the public copy.",
        "",
        "| step | seconds | held before by its side | at the peak |",
        "|---|---|---|---|",
    ]
    for step in steps:
        held, peak = step.held / model, step.peak / model
        lines.append(f"| {step.name} | {step.seconds:.2f} | {held:.2f} models | {peak:.2f} |")
    seconds = sum(step.seconds for step in steps)
    return "\n".join([*lines, f"| all | {seconds:.2f} | | |", ""])


# Apps


def compare_apps(size: int, rounds: int) -> str:
    """Return a table of ServerApp and ClientApp, with stock Flower and with the two lines."""
    model = 4 * size
    lines = [
        f"## {size:,} parameters, {NODES} nodes, {rounds} rounds",
        "",
        "| | ServerApp | ClientApp | seconds a round |",
        "|---|---|---|---|",
    ]
    found = {way: run_apps(way, size, rounds) for way in (STOCK, COMPRESSED)}
    for way, (server, client, seconds) in found.items():
        cells = f"{server / model:.2f} models | {client / model:.2f} models | {seconds:.1f}"
        lines.append(f"| {way} | {cells} |")
    pairs = list(zip(found[STOCK], found[COMPRESSED], strict=True))[:2]
    more = (f"{(ours - stock) / model:+.2f}, {ours / stock:.2f} times" for stock, ours in pairs)
    return "\n".join([*lines, f"| more | {' | '.join(more)} | |", ""])


def run_apps(way: str, size: int, rounds: int) -> tuple[int, int, float]:
    """Return the peaks of both sides, and the mean seconds of a round after the first."""
    context = multiprocessing.get_context("spawn")
    found, pipe = context.Queue(), context.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["AQG_STATE_DIR"] = directory
        sides = [
            context.Process(target=serve, args=(pipe[0], found, way, size, rounds)),
            context.Process(target=work, args=(pipe[1], found, way)),
        ]
        for side in sides:
            side.start()
        peaks = dict(found.get() for _ in sides)
        for side in sides:
            side.join()
    server, seconds = peaks["server"]
    return server, peaks["client"], seconds


def serve(pipe: Any, found: Any, way: str, size: int, rounds: int) -> None:
    """Be the ServerApp."""
    logging.disable(logging.CRITICAL)
    from flwr.app import Array, ArrayRecord, Message
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 7, 1, 1

    class PipeGrid(Grid):
        numbers, replies = count(1), list[Message]()
        run = set_run = create_message = None  # type: ignore[assignment]

        def get_node_ids(self) -> list[int]:
            return list(range(1, NODES + 1))

        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            identifiers = []
            for message in messages:
                message.metadata.__dict__["_message_id"] = identifier = f"m{next(self.numbers)}"
                identifiers.append(identifier)
                send(pipe, message)
                self.replies.append(Message(take(pipe)[2], reply_to=message))
            return identifiers

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:  # noqa: ARG002
            replies, self.replies = self.replies, []
            return replies

        def send_and_receive(
            self,
            messages: Iterable[Message],
            *,
            timeout: float | None = None,  # noqa: ARG002
        ) -> list[Message]:
            return self.pull_messages(self.push_messages(messages))

    times = [time.monotonic()]
    layers = (np.ones(size // LAYERS, np.float32) for _ in range(LAYERS))
    first = ArrayRecord({f"layer{i}": Array(layer) for i, layer in enumerate(layers)})
    strategy: Any = FedAvg(fraction_evaluate=0.0, min_available_nodes=NODES)
    if way == COMPRESSED:
        from aqg.flower import Compressed

        strategy = Compressed(strategy)
    strategy.start(
        PipeGrid(),
        first,
        num_rounds=rounds,
        evaluate_fn=lambda _number, _arrays: times.append(time.monotonic()),
    )
    pipe.send(None)
    found.put(("server", (memory("VmHWM"), mean(np.diff(times[2:])))))


def work(pipe: Any, found: Any, way: str) -> None:
    """Be the ClientApp of all nodes."""
    logging.disable(logging.CRITICAL)
    from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.supercore.task_identity import TaskIdentity

    mods = []
    if way == COMPRESSED:
        from aqg.flower import aqg_mod

        mods.append(aqg_mod)
    app = ClientApp(mods=mods)

    @app.train()
    def handle(message: Message, context: Context) -> Message:
        random, trained = np.random.default_rng(context.node_id), {}
        for name, array in message.content["arrays"].items():
            layer = array.numpy()
            layer -= np.float32(0.01) * random.standard_normal(len(layer), np.float32)
            trained[name] = Array(layer)
        content = {"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 7, 1, 1
    contexts: dict[int, Context] = {}
    while (received := take(pipe)) is not None:
        node, kind, content = received
        context = contexts.setdefault(node, Context(7, node, {}, RecordDict(), {}))
        message = Message(content, node, kind)
        message.metadata.__dict__["_message_id"] = "m"
        del content, received
        send(pipe, app(message, context))
    found.put(("client", memory("VmHWM")))


def send(pipe: Any, message: Any) -> None:
    """Send a message without a copy of its arrays, and without keeping it."""
    from flwr.app import ArrayRecord

    heads, arrays = [], []
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            heads.append((name, [(k, a.dtype, a.shape, a.stype) for k, a in record.items()]))
            arrays += [array.data for array in record.values()]
        else:
            heads.append((name, record))
    pipe.send((message.metadata.dst_node_id, message.metadata.message_type, heads))
    del message
    while arrays:
        pipe.send_bytes(arrays.pop(0))


def take(pipe: Any) -> tuple[int, str, Any] | None:
    """Return what was sent: node, kind and content; None at the end."""
    from flwr.app import Array, ArrayRecord, RecordDict

    received = pipe.recv()
    if received is None:
        return None
    node, kind, heads = received
    records = {}
    for name, head in heads:
        if isinstance(head, list):
            head = ArrayRecord({k: Array(d, s, t, pipe.recv_bytes()) for k, d, s, t in head})
        records[name] = head
    return node, kind, RecordDict(records)


if __name__ == "__main__":
    main()
