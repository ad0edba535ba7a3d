"""What the context coder saves on real MNIST uploads, beside zlib, zstd and the entropy.

    python benchmarks/context_study.py --data-dir DIR [--setting softmax-lean-iid ...]

``DIR`` is laid out like the download cache; without it, ``AQG_DATA_DIR`` or that cache is used.
Every run takes a tenth of the training images and passes real frames through the reference
simulator; forty uploads, evenly spread over the run, are kept in the system's temporary directory,
so that a second call only codes them again. All sizes are means over those uploads, in bytes, of
the payload alone: no length, step or checksum, which every frame adds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from aqg.core.grids import num_levels
from aqg.core.messages import Upload
from aqg.core.recipes import make_recipe
from aqg.core.track import direction_of
from aqg.data import load_dataset
from aqg.runs.config import resolve
from aqg.runs.setup import make_problem
from aqg.sim.reference import ReferenceSimulation
from aqg.wire import context
from aqg.wire.bitpack import pack
from aqg.wire.context import make_hints

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aqg.data import Dataset

NUM_SAMPLES = 40
MODELS = {"softmax": "softmax", "mlp": "mlp:200"}
NUM_ROUNDS = {"softmax": 1500, "mlp": 300}
KEEP_EVERY = 10
"""One training image in this many."""


@dataclass(frozen=True)
class Setting:
    """One run to draw uploads from."""

    model: str
    recipe: str
    split: str

    def __str__(self) -> str:
        return f"{self.model}-{self.recipe}-{self.split}"


SETTINGS = [
    Setting(model, recipe, split)
    for model in ("softmax", "mlp")
    for recipe in ("lean", "aqg-2", "laq")
    for split in ("iid", "label")
]


@dataclass(frozen=True)
class Sample:
    """An upload, and what both ends knew before it."""

    levels: NDArray[np.uint8]
    num_symbols: int
    reference: NDArray[np.int8]
    """`make_hints` of ``ref_m`` alone."""
    direction: NDArray[np.int8]
    """`direction_of` the upload before it."""


def simulate(setting: Setting, dataset: Dataset) -> list[Sample]:
    """Run the reference simulator and return every upload."""
    (config,) = resolve(
        {
            "recipe": setting.recipe,
            "dataset": "mnist",
            "partition": setting.split,
            "model": MODELS[setting.model],
            "dtype": "float32",
        }
    )
    simulation = ReferenceSimulation(
        make_problem(config, dataset), make_recipe(config.recipe), step_size=config.alpha
    )
    num_params = len(simulation.parameters)
    directions = [np.zeros(num_params, np.int8) for _ in simulation.clients]
    samples = []
    for _ in range(NUM_ROUNDS[setting.model]):
        broadcast = simulation.server.broadcast()
        for client in simulation.clients:
            mirror = simulation.server.state.mirror(client.index)
            message = simulation.server.receive(client.index, client.step(broadcast))
            if not isinstance(message, Upload):
                continue
            num_symbols = num_levels(message.grid, message.width)
            hints = make_hints(mirror, message.step)
            samples.append(Sample(message.levels, num_symbols, hints, directions[client.index]))
            directions[client.index] = direction_of(message.levels, num_symbols)
        simulation.server.step()
    return samples


def sampled_uploads(setting: Setting, dataset: Callable[[], Dataset]) -> list[Sample]:
    """Return the setting's uploads, from the temporary directory if they are there."""
    path = Path(tempfile.gettempdir()) / f"aqg-uploads-{setting}.npz"
    if not path.exists():
        everything = simulate(setting, dataset())
        chosen = np.unique(np.linspace(0, len(everything) - 1, NUM_SAMPLES).astype(int))
        samples = [everything[i] for i in chosen]
        np.savez_compressed(
            path,
            levels=np.stack([s.levels for s in samples]),
            num_symbols=np.array([s.num_symbols for s in samples]),
            reference=np.stack([s.reference for s in samples]),
            direction=np.stack([s.direction for s in samples]),
        )
    with np.load(path) as stored:
        columns = [stored[name] for name in ("levels", "num_symbols", "reference", "direction")]
    return [Sample(q, int(k), r, d) for q, k, r, d in zip(*columns, strict=True)]


def thinned_mnist(data_dir: Path | None) -> Dataset:
    """Return MNIST with one training image in `KEEP_EVERY`."""
    dataset = load_dataset("mnist", data_dir)
    return replace(
        dataset, features=dataset.features[::KEEP_EVERY], labels=dataset.labels[::KEEP_EVERY]
    )


def packed(sample: Sample) -> bytes:
    return pack(sample.levels, (sample.num_symbols - 1).bit_length()).tobytes()


def zero_order_bytes(sample: Sample) -> float:
    share = np.bincount(sample.levels) / len(sample.levels)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum() * len(sample.levels) / 8)


def zstd_bytes(data: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=19).compress(data))


def context_bytes(sample: Sample, hints: NDArray[np.int8] | None = None) -> int:
    return len(context.encode(sample.levels, sample.num_symbols, hints=hints))


def context_bytes_without_lags(sample: Sample) -> int:
    nothing = np.empty(0, np.int8), np.empty(0, np.uint8)
    return 2 + context._run(sample.levels, sample.num_symbols, 1, 2, *nothing, decoding=False)


CODERS: dict[str, Callable[[Sample], float]] = {
    "raw": lambda s: len(packed(s)),
    "n·H0/8": zero_order_bytes,
    "zlib-9": lambda s: min(len(zlib.compress(d, 9)) for d in (packed(s), s.levels.tobytes())),
    "zstd-19": lambda s: zstd_bytes(s.levels.tobytes()),
    "zstd-19, packed": lambda s: zstd_bytes(packed(s)),
    "context": context_bytes,
}
VARIANTS: dict[str, Callable[[Sample], float]] = {
    "no lags": context_bytes_without_lags,
    "context": context_bytes,
    "+ last upload": lambda s: context_bytes(s, s.direction),
    "+ ref_m": lambda s: context_bytes(s, s.reference),
    "+ both": lambda s: context_bytes(s, s.reference + s.direction),
}


def print_sizes(
    coders: dict[str, Callable[[Sample], float]], uploads: dict[Setting, list[Sample]]
) -> None:
    print("| upload | " + " | ".join(coders) + " |")
    print("|---" * (len(coders) + 1) + "|")
    for setting, samples in uploads.items():
        sizes = [np.mean([coder(s) for s in samples]) for coder in coders.values()]
        print(f"| {setting} | " + " | ".join(f"{size:.0f}" for size in sizes) + " |", flush=True)


def fastest(function: Callable[[], object], repeats: int = 9) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def print_speeds(uploads: dict[Setting, list[Sample]]) -> None:
    print("| upload | encode, million symbols/s | decode, million symbols/s |")
    print("|---|---|---|")
    for setting, samples in uploads.items():
        speeds = []
        for sample in samples[:: len(samples) // 5]:
            n, k, levels = len(sample.levels), sample.num_symbols, sample.levels
            payload = context.encode(levels, k)
            encoding = fastest(lambda levels=levels, k=k: context.encode(levels, k))
            decoding = fastest(lambda payload=payload, n=n, k=k: context.decode(payload, n, k))
            speeds.append((n / encoding / 1e6, n / decoding / 1e6))
        encode_speed, decode_speed = np.median(speeds, axis=0)
        print(f"| {setting} | {encode_speed:.0f} | {decode_speed:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--setting", nargs="*", choices=[str(s) for s in SETTINGS])
    arguments = parser.parse_args()
    chosen = [s for s in SETTINGS if not arguments.setting or str(s) in arguments.setting]
    uploads = {s: sampled_uploads(s, lambda: thinned_mnist(arguments.data_dir)) for s in chosen}
    print_sizes(CODERS, uploads)
    print()
    print_sizes(VARIANTS, uploads)
    print()
    print_speeds(uploads)


if __name__ == "__main__":
    main()
