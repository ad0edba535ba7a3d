"""Write the golden frames: ``PYTHONPATH=src python -m tests.wire.golden.make``.

A golden frame is never rewritten: decoders of this version must read it for ever.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

from aqg.core.grids import Grid
from aqg.core.messages import DenseUpload, Message, Skip, Upload
from aqg.wire import Known, encode
from aqg.wire.frame import Mode

from tests.wire.samples import laplace_upload

HERE = Path(__file__).parent


def golden_messages() -> dict[str, Message]:
    """Return one message for each mode, method and number of planes."""
    random = np.random.default_rng(2024)
    smooth = np.repeat(laplace_upload(Grid.MIDTREAD, 4, 100, 2.0, seed=1).levels, 10)
    normal = random.normal(size=400).astype(np.float32)
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
    }


def golden_known(length: int) -> Known:
    """Return what both ends know in the hinted golden frame: numbers that are exact anywhere."""
    reference = (np.arange(length) % 17 - 8) * np.float32(0.25)
    return Known(reference.astype(np.float32), (np.arange(length) % 7 - 3).astype(np.int8))


def main() -> None:
    """Write those frames that are not there yet, and the list of all."""
    cases = []
    for name, message in golden_messages().items():
        path = HERE / f"{name}.bin"
        known = golden_known(1000) if name == "hinted-4-bit" else None
        frame = encode(message, known=known)
        if not path.exists():
            path.write_bytes(frame)
        case: dict[str, object] = {"name": name, "mode": Mode(frame[0] & 0x1F).name, "length": 0}
        content = b""
        if isinstance(message, Upload):
            content = message.levels.astype("<u2").tobytes()
            case |= {"width": message.width, "grid": str(message.grid), "step": message.step}
        elif isinstance(message, DenseUpload):
            content = message.dense.astype("<f4").tobytes()
        if not isinstance(message, Skip):
            case["length"] = len(message)
        cases.append(case | {"content_crc32": zlib.crc32(content)})
        print(f"{name:16} {case['mode']:12} {len(frame):6} bytes")
    (HERE / "frames.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
