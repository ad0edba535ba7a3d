"""A large model through the channel: peak memory and seconds of every step of a round.

    python benchmarks/large.py [--parameters 100000000] [--rounds 3] [--recipe auto]

Server and one client in one process, without a framework; the client's memory is on disk. What is
held is what both sides hold when a step begins, and its peak is that with all the step needs, in
models of 32 bits per parameter. Plain copies are what a framework does without the channel: the
model is written to bytes and read back in either direction.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from aqg.channel.client import CopyStore, Held, receive, reply_to
from aqg.channel.server import Channel
from aqg.channel.settings import make_settings
from aqg.protocol.messages import Order
from aqg.protocol.store import ClientStore, DirectoryVault

LAYERS = 20
Result = TypeVar("Result")


class Step(NamedTuple):
    """What a step took; memory in bytes, before it and at its peak."""

    name: str
    seconds: float
    held: int
    peak: int


class Meter:
    """Measures steps one after the other."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def time(self, name: str, work: Callable[[], Result]) -> Result:
        """Do something, and note what it takes."""
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        begun = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begun
        peak = tracemalloc.get_traced_memory()[1]
        self.steps.append(Step(name, seconds, before, peak))
        return result


class Notes:
    """A client's memory on disk, as of the adapters."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def terms(self) -> list[Order]:
        found = self.copies("large").terms()
        return [] if found is None else [found]

    def copies(self, run: str) -> CopyStore:
        return CopyStore(DirectoryVault(self._directory / "copy"), run)

    def mirrors(self, run: str, fingerprint: bytes, layout: bytes) -> ClientStore:  # noqa: ARG002
        return ClientStore(DirectoryVault(self._directory / "mirror"), run)


def make_model(parameters: int) -> dict[str, np.ndarray]:
    """Return a model of some large tensors."""
    random, size = np.random.default_rng(0), parameters // LAYERS
    return {f"layer{k}": random.standard_normal(size, np.float32) for k in range(LAYERS)}


def train(values: Any, number: int) -> dict[str, np.ndarray]:
    """Return a model that training has moved, tensor by tensor."""
    random = np.random.default_rng(number)
    return {
        name: tensor + np.float32(0.01) * random.standard_normal(tensor.shape, np.float32)
        for name, tensor in values.items()
    }


def run_channel(parameters: int, rounds: int, recipe: str, directory: Path) -> list[Step]:
    """Return the steps of the last round."""
    model = make_model(parameters)
    notes = Notes(directory)
    channel = Channel("large", model, make_settings(recipe))
    meter = Meter()
    for number in range(1, rounds + 1):
        meter.steps.clear()
        phase = meter.time("server: publish", lambda m=model: channel.publish(m, is_train=True))
        order, is_full = meter.time("server: order", lambda: channel.order(1, evaluate=False))
        whole = dict(channel.copied()) if is_full else None
        held: Held = meter.time("client: receive", lambda o=order, w=whole: receive(o, w, notes))
        after = train(held.values, number)
        part = meter.time("client: reply", lambda h=held, a=after: reply_to(h, a, notes))
        del held, after, whole
        taken = meter.time("server: take", lambda p=phase, r=part: channel.take(1, p, r))
        model = meter.time("server: the reply as a model", lambda t=taken: dict(t.tensors()))
        meter.time("server: commit", taken.commit)
        sizes = len(order), len(part)
        del taken, phase, order, part
    print(f"last round: {sizes[0]:,} bytes down, {sizes[1]:,} bytes up")
    return list(meter.steps)


def run_plain(parameters: int, rounds: int) -> list[Step]:
    """Return the steps of the last round with plain copies."""
    model, meter = make_model(parameters), Meter()
    for number in range(1, rounds + 1):
        meter.steps.clear()
        sent = meter.time("server: write", lambda m=model: _write(m))
        held = meter.time("client: read", lambda s=sent: _read(s))
        after = train(held, number)
        sent = meter.time("client: write", lambda a=after: _write(a))
        del held, after
        model = meter.time("server: read", lambda s=sent: _read(s))
        del sent
    return list(meter.steps)


def _write(model: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in model.items()}


def _read(sent: dict[str, bytes]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(data, np.float32).copy() for name, data in sent.items()}


def show(title: str, steps: list[Step], model_bytes: int) -> None:
    """Print a table."""
    print(f"\n| {title} | seconds | held before | at the peak |")
    print("|---|---|---|---|")
    for step in steps:
        held, peak = step.held / model_bytes, step.peak / model_bytes
        print(f"| {step.name} | {step.seconds:.2f} | {held:.2f} models | {peak:.2f} |")
    print(f"| all | {sum(step.seconds for step in steps):.2f} | | |", flush=True)


def main() -> None:
    """Measure both."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipe", default="auto")
    options = parser.parse_args()
    if options.parameters < LAYERS or options.rounds < 1:
        parser.error(
            f"parameters is {options.parameters}, rounds {options.rounds}; at least {LAYERS} and 1"
        )
    size = 4 * options.parameters
    tracemalloc.start()
    print(f"{options.parameters:,} parameters in {LAYERS} tensors, recipe {options.recipe}")
    with tempfile.TemporaryDirectory() as directory:
        run_channel(LAYERS * 1000, 2, options.recipe, Path(directory) / "warm")  # compiles
        steps = run_channel(
            options.parameters, options.rounds, options.recipe, Path(directory) / "run"
        )
    show("channel", steps, size)
    show("plain copies", run_plain(options.parameters, options.rounds), size)


if __name__ == "__main__":
    main()
