"""How small and how fast sparse uploads are, on the updates of a real network.

    python benchmarks/sparse_frames.py      # MNIST, 784-200-10, about a minute

Ten clients with Dirichlet(0.3) labels take five local steps a round and send `stc` uploads. For
those of the last round this prints, as means over clients, in bytes: the entropy of as many random
places and signs, ``(log2(n choose k) + k)/8``; the same places and signs coded as gaps between them
(the ideal length of an adaptive code, without any overhead), by rANS alone, and by the context
coder; the frames of `stc` and of `topk` with the same coordinates; and the time of the latter.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from aqg.core.quantizers import SparseTernary, TopK
from aqg.core.recipes import make_recipe
from aqg.runs.config import RunConfig
from aqg.runs.setup import build_problem
from aqg.sim.engine import FastSimulation
from aqg.sim.training import LocalTraining, Training
from aqg.wire import context, decode, encode
from aqg.wire.sections import Alphabet, Plane, encode_planes

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqg.core.messages import SparseUpload, Upload
    from aqg.sim.problem import Problem

ROUNDS = 12
SHARES = (0.01, 0.002, 0.0005)


class Recorder(SparseTernary):
    """`stc` that also remembers what it was given, and the same coordinates as halves."""

    seen: list[tuple[Upload, SparseUpload]]

    def quantize(self, vector, request):
        upload = super().quantize(vector, request)
        self.seen.append((upload, TopK(self.keep).quantize(vector, request)))
        return upload


def record(problem: Problem, share: float) -> list[tuple[Upload, SparseUpload]]:
    """Train with `stc` and return the uploads of the last round."""
    recorder = Recorder(share)
    object.__setattr__(recorder, "seen", [])
    recipe = dataclasses.replace(make_recipe("stc"), quantizer=recorder)
    training = Training(local=LocalTraining(batch_size=64, steps=5, rate=0.1))
    simulation = FastSimulation(problem, recipe, 0.05, training=training)
    for _ in range(ROUNDS):
        simulation.run_round(evaluate=False)
    return recorder.seen[-problem.num_clients :]


def entropy_bytes(length: int, count: int) -> float:
    """Return ``(log2(n choose k) + k)/8``."""
    places = math.lgamma(length + 1) - math.lgamma(count + 1) - math.lgamma(length - count + 1)
    return (places / math.log(2) + count) / 8


class AdaptiveCode:
    """Ideal code lengths under counts that are learned on the way, one set per context."""

    def __init__(self, size: int, start: float) -> None:
        self.counts = defaultdict(lambda: np.full(size, start))
        self.bits = 0.0

    def add(self, context_key: object, symbol: int) -> None:
        counts = self.counts[context_key]
        self.bits -= math.log2(counts[symbol] / counts.sum())
        counts[symbol] += 1


def gap_bytes(levels: np.ndarray) -> float:
    """Code each gap's bit length given the last one's, its next two bits, and the signs."""
    places = np.flatnonzero(levels != 1)
    lengths, mantissas, signs = AdaptiveCode(40, 0.2), AdaptiveCode(2, 0.4), AdaptiveCode(2, 0.4)
    plain_bits, last, last_sign = 0, 0, 0
    for gap, level in zip(np.diff(places, prepend=-1).tolist(), levels[places], strict=True):
        length = gap.bit_length()
        lengths.add(last, length)
        for shift in range(length - 2, -1, -1):
            if length - shift <= 3:
                mantissas.add((length, shift, gap >> (shift + 1)), gap >> shift & 1)
            else:
                plain_bits += 1
        sign = int(level > 1)
        signs.add((min(length, 6), last_sign), sign)
        last, last_sign = length, sign
    return (lengths.bits + mantissas.bits + signs.bits + plain_bits) / 8


def seconds(function: Callable[[], object]) -> float:
    """Return the shortest of five calls."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    config = RunConfig(
        recipe="stc",
        dataset="mnist",
        partition="dirichlet:0.3",
        model="mlp:200",
        clients=10,
        rounds=ROUNDS,
        alpha=0.05,
        dtype="float32",
    )
    problem = build_problem(config, os.environ.get("AQG_DATA_DIR"))
    names = ("kept", "k", "entropy", "gaps", "rANS", "context", "stc frame", "topk frame")
    print("| " + " | ".join((*names, "size ms", "encode ms", "decode ms")) + " |")
    print("|" + "---|" * (len(names) + 3))
    for share in SHARES:
        rows = []
        for ternary, sparse in record(problem, share):
            levels, length = ternary.levels, len(ternary)
            frame = encode(sparse)
            rows.append(
                [
                    len(sparse.indices),
                    entropy_bytes(length, len(sparse.indices)),
                    gap_bytes(levels),
                    len(encode_planes([Plane(levels, Alphabet(2, 3))], threads=1)),
                    len(context.encode(levels, 3)),
                    len(encode(ternary)),
                    len(frame),
                    1e3 * seconds(lambda sparse=sparse: encode(sparse)),
                    1e3 * seconds(lambda sparse=sparse: encode(sparse)),
                    1e3 * seconds(lambda frame=frame, length=length: decode(frame, length)),
                ]
            )
        means = np.mean(rows, axis=0)
        cells = [f"{value:.0f}" for value in means[:7]] + [f"{value:.1f}" for value in means[7:]]
        print(f"| {share:.2%} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
