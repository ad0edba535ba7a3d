"""Write the golden frames of modes 10 to 15: ``python -m tests.wire.golden.make_field``.

A golden frame is never rewritten: decoders of this version must read it for ever.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aqg.core.blockwise import BlockUpload, quantize_blocks, quantize_buckets
from aqg.core.halves import HalfUpload, SparseUpload, to_halves
from aqg.core.rotation import RotatedUpload, quantize_rotated
from aqg.wire import encode
from aqg.wire.frame import Mode

if TYPE_CHECKING:
    from aqg.core.messages import AnyUpload

HERE = Path(__file__).parent


def keep(vector: np.ndarray, indices: np.ndarray) -> SparseUpload:
    """Return a sparse message of these coordinates."""
    return SparseUpload(indices, *to_halves(vector[indices]), len(vector))


def golden_messages() -> dict[str, AnyUpload]:
    """Return messages of every mode, and both ways to code places."""
    random = np.random.default_rng(2025)
    vector = random.standard_t(3, 3000) * 1e-3
    clustered = np.flatnonzero(np.repeat(random.random(300) < 0.05, 10))
    return {
        "half": HalfUpload(*to_halves(vector)),
        "sparse-clustered": keep(vector, clustered),
        "sparse-scattered": keep(vector, np.sort(random.choice(3000, 900, replace=False))),
        "sparse-nothing": keep(vector, np.empty(0, np.int64)),
        "blocks": BlockUpload(*quantize_blocks(vector)),
        "rotated": RotatedUpload(*quantize_rotated(vector, 2025, True), 2025, 3000),
        "buckets": BlockUpload(*quantize_buckets(vector, 512, 7, random.random(3000)), 512),
        "turned-2-bit": RotatedUpload(*quantize_rotated(vector, 7, True, 2), 7, 3000, 2),
        "turned-4-bit": RotatedUpload(*quantize_rotated(vector, 7, False, 4), 7, 3000, 4),
    }


def content_crc32(message: AnyUpload) -> int:
    """Return the checksum of the vector that a message stands for."""
    return zlib.crc32((message.values(np.float64) + 0.0).astype("<f8").tobytes())


def main() -> None:
    """Write those frames that are not there yet, and the list of all."""
    cases = []
    for name, message in golden_messages().items():
        path = HERE / f"{name}.bin"
        frame = encode(message)
        if not path.exists():
            path.write_bytes(frame)
        mode = Mode(frame[0] & 0x1F).name
        cases.append(
            {
                "name": name,
                "mode": mode,
                "length": len(message),
                "content_crc32": content_crc32(message),
            }
        )
        print(f"{name:16} {mode:12} {len(frame):6} bytes")
    (HERE / "field_frames.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
