"""Size and speed of the wire codec against others, in one process and on one thread.

    python benchmarks/codec.py            # n up to 10^7, a few minutes
    python benchmarks/codec.py --large    # 10^8 as well

Levels are drawn independently with a two-sided exponential distribution, so that the zero-order
entropy H0 is a lower bound on every lossless size: real uploads have structure, these have none.
Times are multiples of a memcpy of the float32 gradient of the same length.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zstandard

from aqg.core.grids import Grid, level_dtype, measure, num_levels, quantize
from aqg.core.messages import DenseUpload, Upload
from aqg.wire import decode, encode, warm_up
from aqg.wire.bitpack import pack, unpack
from aqg.wire.frame import Mode
from aqg.wire.sections import decode_planes, encode_planes, level_alphabets, split_levels

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    import constriction
except ImportError:
    constriction = None

LENGTHS = (34, 1000, 7850, 159_010, 10_000_000)
ENTROPY_BITS = {2: 1.0, 4: 1.0, 8: 3.0}
BLOCK = 64
SECONDS_PER_MEASUREMENT = 0.3


class Row(NamedTuple):
    """One measured codec: sizes in bytes, times in seconds."""

    length: int
    width: int
    entropy_bits: float
    codec: str
    size: int
    encode_seconds: float
    decode_seconds: float
    memcpy_seconds: float


class Codec(NamedTuple):
    name: str
    encode: Callable[[Sample], bytes]
    decode: Callable[[bytes, Sample], object]
    longest: int = 10**9


class Sample(NamedTuple):
    """The same message in every form a codec may ask for."""

    upload: Upload
    gradient: np.ndarray
    entropy_bits: float


def draw_sample(length: int, width: int, entropy_bits: float) -> Sample:
    num_symbols = num_levels(Grid.MIDTREAD, width)
    distance = np.abs(np.arange(num_symbols) - (num_symbols - 1) / 2)
    low, high = 1e-3, 1e5
    for _ in range(60):
        scale = (low * high) ** 0.5
        p = np.exp(-distance / scale)
        p /= p.sum()
        if -(p * np.log2(np.maximum(p, 1e-300))).sum() < entropy_bits:
            low = scale
        else:
            high = scale
    random = np.random.default_rng(length + width)
    levels = np.searchsorted(np.cumsum(p), random.random(length, np.float32) * p.sum())
    levels = np.minimum(levels, num_symbols - 1).astype(level_dtype(width))
    upload = Upload(levels, 2.0**-6, width, Grid.MIDTREAD)
    noise = random.uniform(-0.4, 0.4, length).astype(np.float32) * np.float32(upload.step)
    counts = np.bincount(levels)
    counts = counts[counts > 0]
    measured = float(-(counts / length * np.log2(counts / length)).sum())
    return Sample(upload, upload.values(np.float32) + noise, measured)


def codecs() -> list[Codec]:
    fast, best = zstandard.ZstdCompressor(level=1), zstandard.ZstdCompressor(level=19)
    unzstd = zstandard.ZstdDecompressor()
    found = [
        Codec(
            "aqg frame",
            lambda s: encode(s.upload, threads=1),
            lambda data, s: decode(data, len(s.upload), threads=1),
        ),
        Codec("aqg rANS", _encode_rans, _decode_rans),
        Codec(
            "aqg bit packing",
            lambda s: pack(s.upload.levels, s.upload.width).tobytes(),
            lambda data, s: unpack(_array(data), s.upload.width, len(s.upload)),
        ),
        Codec(
            "NumPy bit packing",
            lambda s: _pack_numpy(s.upload.levels, s.upload.width).tobytes(),
            lambda data, s: _unpack_numpy(_array(data), s.upload.width, len(s.upload)),
        ),
        Codec(
            "zlib-6",
            lambda s: zlib.compress(s.upload.levels),
            lambda data, _: zlib.decompress(data),
        ),
        Codec(
            "zstd-1",
            lambda s: fast.compress(s.upload.levels),
            lambda data, _: unzstd.decompress(data),
        ),
        Codec(
            "zstd-19",
            lambda s: best.compress(s.upload.levels),
            lambda data, _: unzstd.decompress(data),
            longest=1_000_000,
        ),
        Codec(
            "fp16 (lossy)",
            lambda s: s.gradient.astype(np.float16).tobytes(),
            lambda data, _: np.frombuffer(data, np.float16).astype(np.float32),
        ),
        Codec("8-bit blockwise (lossy)", _encode_blockwise, _decode_blockwise),
    ]
    if constriction is not None:
        found.append(Codec("constriction", _encode_constriction, _decode_constriction))
    return found


def _pack_numpy(levels: np.ndarray, width: int) -> np.ndarray:
    bits = levels.astype(np.uint16)[:, None] >> np.arange(width, dtype=np.uint16) & np.uint16(1)
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little")


def _unpack_numpy(packed: np.ndarray, width: int, length: int) -> np.ndarray:
    bits = np.unpackbits(packed, count=length * width, bitorder="little").reshape(length, width)
    return (bits @ (1 << np.arange(width))).astype(np.uint16 if width > 8 else np.uint8)


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _encode_rans(s: Sample) -> bytes:
    return encode_planes(split_levels(s.upload), threads=1)


def _decode_rans(data: bytes, s: Sample) -> np.ndarray:
    alphabets = level_alphabets(s.upload.grid, s.upload.width)
    return decode_planes(_array(data), alphabets, len(s.upload), threads=1)[0]


def _encode_blockwise(s: Sample) -> bytes:
    """Scale blocks of 64 by their largest magnitude, then 8 bits per value."""
    padded = np.zeros(-(-len(s.gradient) // BLOCK) * BLOCK, np.float32)
    padded[: len(s.gradient)] = s.gradient
    blocks = padded.reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    scaled = blocks * (np.float32(127) / np.maximum(scales, np.float32(1e-30)))
    return scales.tobytes() + np.rint(scaled).astype(np.int8).ravel()[: len(s.gradient)].tobytes()


def _decode_blockwise(data: bytes, s: Sample) -> np.ndarray:
    num_blocks = -(-len(s.gradient) // BLOCK)
    scales = np.frombuffer(data, np.float32, num_blocks) / np.float32(127)
    values = np.frombuffer(data, np.int8, offset=4 * num_blocks).astype(np.float32)
    return values * np.repeat(scales, BLOCK)[: len(values)]


def _constriction_model(s: Sample) -> object:
    counts = np.bincount(s.upload.levels, minlength=num_levels(s.upload.grid, s.upload.width))
    p = np.maximum(counts, 1e-3).astype(np.float64)
    return constriction.stream.model.Categorical(p / p.sum(), perfect=False)


def _encode_constriction(s: Sample) -> bytes:
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(s.upload.levels.astype(np.int32), _constriction_model(s))
    return coder.get_compressed().tobytes()


def _decode_constriction(data: bytes, s: Sample) -> np.ndarray:
    coder = constriction.stream.stack.AnsCoder(np.frombuffer(data, np.uint32))
    return coder.decode(_constriction_model(s), len(s.upload))


def best_time(function: Callable[[], object]) -> float:
    """Return the shortest of at least three runs, in seconds."""
    best = float("inf")
    begin = time.perf_counter()
    runs = 0
    while runs < 3 or (runs < 1000 and time.perf_counter() - begin < SECONDS_PER_MEASUREMENT):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


def time_memcpy(gradient: np.ndarray) -> float:
    target = np.empty_like(gradient)
    return best_time(lambda: np.copyto(target, gradient))


def measure_codec(codec: Codec, sample: Sample, memcpy_seconds: float) -> Row:
    data = codec.encode(sample)
    decoded = codec.decode(data, sample)
    if "lossy" not in codec.name:
        levels = decoded.levels if isinstance(decoded, Upload) else decoded
        if isinstance(levels, bytes):
            levels = np.frombuffer(levels, sample.upload.levels.dtype)
        np.testing.assert_array_equal(levels, sample.upload.levels)
    name = codec.name
    if name == "aqg frame":
        name += f" ({Mode(data[0] & 0x1F).name.lower()})"
    return Row(
        len(sample.upload),
        sample.upload.width,
        sample.entropy_bits,
        name,
        len(data),
        best_time(lambda: codec.encode(sample)),
        best_time(lambda: codec.decode(data, sample)),
        memcpy_seconds,
    )


HEADINGS = ("n", "b", "H0", "codec", "bytes", "bits/n", "size/H0")
HEADINGS += ("encode ×memcpy", "decode ×memcpy", "encode M/s", "decode M/s")


def format_row(row: Row) -> list[str]:
    ideal = row.length * row.entropy_bits / 8
    return [
        f"{row.length}",
        f"{row.width}",
        f"{row.entropy_bits:.2f}",
        row.codec,
        f"{row.size}",
        f"{8 * row.size / row.length:.3f}",
        f"{row.size / ideal:.4f}",
        f"{row.encode_seconds / row.memcpy_seconds:.1f}",
        f"{row.decode_seconds / row.memcpy_seconds:.1f}",
        f"{row.length / row.encode_seconds / 1e6:.0f}",
        f"{row.length / row.decode_seconds / 1e6:.0f}",
    ]


def print_table(lines: list[list[str]], headings: tuple[str, ...]) -> None:
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    for line in [list(headings), ["-" * width for width in widths], *lines]:
        cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("| " + " | ".join(cells) + " |")
    print(flush=True)


def client_lines(lengths: list[int]) -> list[list[str]]:
    """Time what a client does before the entropy coder: statistics, levels, bit packing."""
    lines = []
    for length in lengths:
        gradient = np.random.default_rng(0).laplace(size=length).astype(np.float32)
        memcpy = time_memcpy(gradient)

        def statistics(gradient: np.ndarray = gradient) -> float:
            return float(measure(gradient, Grid.MIDTREAD, max_width=4).steps[3])

        step = statistics()
        levels = quantize(gradient, Grid.MIDTREAD, 4, step)

        def everything(gradient: np.ndarray = gradient) -> object:
            return pack(quantize(gradient, Grid.MIDTREAD, 4, statistics(gradient)), 4)

        times = [
            best_time(statistics),
            best_time(lambda g=gradient, s=step: quantize(g, Grid.MIDTREAD, 4, s)),
            best_time(lambda levels=levels: pack(levels, 4)),
            best_time(everything),
        ]
        lines.append([f"{length}", f"{memcpy * 1e6:.1f}", *(f"{t / memcpy:.2f}" for t in times)])
    return lines


def dense_lines(lengths: list[int]) -> list[list[str]]:
    """Measure frames of normally distributed float32 values."""
    lines = []
    for length in lengths:
        message = DenseUpload(np.random.default_rng(0).normal(size=length).astype(np.float32))
        memcpy = time_memcpy(message.dense)
        frame = encode(message, threads=1)
        if decode(frame, length, threads=1) != message:
            raise AssertionError("a dense upload does not survive the wire")
        encode_seconds = best_time(lambda message=message: encode(message, threads=1))
        decode_seconds = best_time(lambda frame=frame, n=length: decode(frame, n, threads=1))
        ratios = (encode_seconds / memcpy, decode_seconds / memcpy)
        lines.append(
            [
                f"{length}",
                f"{len(frame)}",
                f"{len(frame) / length:.3f}",
                *(f"{r:.1f}" for r in ratios),
            ]
        )
    return lines


FIRST_CALL = """
import time
start = time.perf_counter()
import numpy as np
from aqg.core.grids import Grid
from aqg.core.messages import Upload
from aqg import wire
imported = time.perf_counter()
wire.decode(wire.encode(Upload(np.arange(100, dtype=np.uint8) % 7, 1.0, 3, Grid.MIDTREAD)), 100)
called = time.perf_counter()
wire.warm_up()
print(imported - start, called - imported, time.perf_counter() - called)
"""


def first_call_line() -> list[str]:
    """Time import and first call in fresh processes, with compiled kernels on disk."""
    runs = [
        [float(t) for t in subprocess.check_output([sys.executable, "-c", FIRST_CALL]).split()]
        for _ in range(3)
    ]
    parts = min(runs, key=sum)
    return [f"{t:.2f}" for t in (*parts, sum(parts[:2]))]


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    def family(row: Row) -> str:
        return row.codec.split(" (")[0]

    shown = [row for row in rows if row.width == 4]
    names = list(dict.fromkeys(map(family, shown)))
    colors = {name: plt.get_cmap("tab10")(i) for i, name in enumerate(names)}
    figure, (sizes, speeds) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for name in names:
        own = [row for row in shown if family(row) == name]
        ratio = [8 * row.size / (row.length * row.entropy_bits) for row in own]
        bold = name == "aqg frame"
        sizes.plot(
            [row.length for row in own],
            ratio,
            marker="o",
            linewidth=3 if bold else 1.5,
            color=colors[name],
            label=name,
            zorder=3 if bold else 2,
        )
    sizes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    sizes.set(
        xscale="log",
        yscale="log",
        xlabel="number of parameters",
        ylabel="bytes / zero-order entropy of the levels",
        title="Size, 4-bit levels with 1 bit of entropy",
    )
    ticks = [1, 1.5, 2, 4, 8, 16]
    sizes.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    sizes.minorticks_off()
    sizes.set_ylim(0.9, 120)
    sizes.grid(alpha=0.3)
    sizes.legend(fontsize=8, ncols=3, loc="upper right")

    longest = 10_000_000 if any(row.length == 10_000_000 for row in shown) else shown[-1].length
    last = [row for row in shown if row.length == longest]
    places = np.arange(len(last))
    for offset, label, times in (
        (-0.2, "encode", [row.encode_seconds / row.memcpy_seconds for row in last]),
        (0.2, "decode", [row.decode_seconds / row.memcpy_seconds for row in last]),
    ):
        bars = speeds.barh(places + offset, times, 0.38, label=label)
        speeds.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    speeds.set_yticks(places, [row.codec for row in last], fontsize=9)
    speeds.invert_yaxis()
    speeds.set(
        xscale="log",
        xlabel="time / memcpy of the float32 gradient",
        title=f"Time, n = {longest:,}, one thread",
    )
    speeds.margins(x=0.15)
    speeds.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="measure n = 10^8 as well")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N")
    parser.add_argument("--widths", type=int, nargs="+", default=list(ENTROPY_BITS), metavar="B")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/codec.png"))
    options = parser.parse_args()
    lengths = [*options.lengths, 10**8] if options.large else options.lengths
    warm_up()
    rows = []
    for length in lengths:
        for width in options.widths:
            sample = draw_sample(length, width, ENTROPY_BITS.get(width, 1.0))
            memcpy = time_memcpy(sample.gradient)
            rows += [
                measure_codec(codec, sample, memcpy)
                for codec in codecs()
                if length <= codec.longest
            ]
            print(f"n = {length}, b = {width} done", file=sys.stderr)
    print_table([format_row(row) for row in rows], HEADINGS)
    headings = ("n", "memcpy µs", "statistics", "quantize", "pack", "all three ×memcpy")
    print_table(client_lines(lengths), headings)
    headings = ("n", "dense bytes", "bytes/n", "encode ×memcpy", "decode ×memcpy")
    print_table(dense_lines(lengths), headings)
    headings = ("import s", "first call s", "all other kernels s", "import + first call s")
    print_table([first_call_line()], headings)
    if constriction is None:
        print("constriction is not installed: its rows are missing")
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
