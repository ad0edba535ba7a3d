"""Write the golden frames: ``PYTHONPATH=src python -m tests.wire.golden.make``.

A golden frame is never rewritten: decoders of this version must read it for ever.
"""

import functools
import json
import zlib
from pathlib import Path

import numpy as np

from aqg.core.grids import Grid
from aqg.core.messages import (
    BlockUpload,
    DenseUpload,
    HalfUpload,
    RotatedUpload,
    Skip,
    SparseUpload,
    Upload,
    quantize_blocks,
    quantize_rotated,
    random_places,
    to_halves,
)
from aqg.wire import Known, encode
from aqg.wire.frame import Mode

from tests.wire.samples import laplace_upload

HERE = Path(__file__).parent


def golden_known(length):
    """Return what both ends know in the hinted golden frame: numbers that are exact anywhere."""
    reference = (np.arange(length) % 17 - 8) * np.float32(0.25)
    return Known(reference.astype(np.float32), (np.arange(length) % 7 - 3).astype(np.int8))


def keep(vector, indices):
    """Return a sparse message of these coordinates."""
    return SparseUpload(indices, *to_halves(vector[indices]), len(vector))


@functools.cache
def golden_messages():
    """Return messages of each mode, method, number of planes and way to code places."""
    random = np.random.default_rng(2024)
    smooth = np.repeat(laplace_upload(Grid.MIDTREAD, 4, 100, 2.0, seed=1).levels, 10)
    normal = random.normal(size=400).astype(np.float32)
    random = np.random.default_rng(2025)
    vector = random.standard_t(3, 3000) * 1e-3
    few = vector[random_places(11, 3000, 750)]
    clustered = np.flatnonzero(np.repeat(random.random(300) < 0.05, 10))
    return {
        "skip": Skip(),
        "empty": Upload(np.zeros(0, np.uint8), 0.0, 3, Grid.MIDRISE),
        "raw-3-bit": laplace_upload(Grid.MIDRISE, 3, 34, 3.0, seed=2),
        "raw-16-bit": laplace_upload(Grid.MIDRISE, 16, 34, 16.0, seed=3),
        "constant": Upload(np.full(7850, 7, np.uint8), 0.0, 4, Grid.MIDTREAD),
        "context-4-bit": Upload(smooth, 1.5, 4, Grid.MIDTREAD),
        "hinted-4-bit": Upload(smooth, 1.5, 4, Grid.MIDTREAD),
        "coded-one-lane": laplace_upload(Grid.MIDTREAD, 2, 60_000, 0.1, seed=4),
        "coded-lanes": laplace_upload(Grid.MIDTREAD, 8, 33_000, 6.5, seed=5),
        "coded-planes": laplace_upload(Grid.MIDTREAD, 10, 20_000, 7.0, seed=6),
        "coded-grouped": laplace_upload(Grid.MIDTREAD, 3, 1 << 21, 0.02, seed=7),
        "dense": DenseUpload(normal[:9]),
        "dense-coded": DenseUpload(normal),
        "half": HalfUpload(*to_halves(vector)),
        "sparse-clustered": keep(vector, clustered),
        "sparse-scattered": keep(vector, np.sort(random.choice(3000, 900, replace=False))),
        "sparse-nothing": keep(vector, np.empty(0, np.int64)),
        "blocks": BlockUpload(*quantize_blocks(vector)),
        "rotated": RotatedUpload(*quantize_rotated(vector, 2025, True), 2025, 3000),
        "buckets": BlockUpload(*quantize_blocks(vector, 512, 7, random.random(3000)), 512),
        "turned-2-bit": RotatedUpload(*quantize_rotated(vector, 7, True, 2), 7, 3000, 2),
        "turned-4-bit": RotatedUpload(*quantize_rotated(vector, 7, False, 4), 7, 3000, 4),
        "sampled": RotatedUpload(*quantize_rotated(few, 11, False), 11, 3000, 1, 750),
    }


def content_crc32(message):
    """Return the checksum of what a message stands for."""
    if isinstance(message, Upload):
        return zlib.crc32(message.levels.astype("<u2").tobytes())
    if isinstance(message, DenseUpload):
        return zlib.crc32(message.dense.astype("<f4").tobytes())
    if isinstance(message, Skip):
        return 0
    return zlib.crc32((message.values(np.float64) + 0.0).astype("<f8").tobytes())


def main():
    """Write those frames that are not there yet, and the list of all."""
    cases = []
    for name, message in golden_messages().items():
        path = HERE / f"{name}.bin"
        frame = encode(message, known=golden_known(1000) if name == "hinted-4-bit" else None)
        if not path.exists():
            path.write_bytes(frame)
        frame = path.read_bytes()  # which may be of another mode than is the shortest today
        length = 0 if isinstance(message, Skip) else len(message)
        case = {"name": name, "mode": Mode(frame[0] & 0x1F).name, "length": length}
        if isinstance(message, Upload):
            case |= {"width": message.width, "grid": str(message.grid), "step": message.step}
        cases.append(case | {"content_crc32": content_crc32(message)})
    (HERE / "frames.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
