"""Coverage-guided fuzzing of the decoders: see README.md beside this file.

``frames`` feeds `aqg.wire.decode`: the first two bytes of an input are the length that the receiver
expects. ``logs`` feeds the readers of logs and snapshots. The lowest bit of the byte after that
tells whether to repair the checksum, so that the fuzzer gets past it, and of a log the next one
which model its reader holds; the rest is the frame.

Numba is hidden: the kernels then run as plain Python, and the fuzzer sees every branch in them.
"""

from __future__ import annotations

import sys

import atheris

sys.modules["numba"] = None  # type: ignore[assignment]

with atheris.instrument_imports(include=["aqg.wire", "aqg.core.downlink", "aqg.core.messages"]):
    import numpy as np

    from aqg.wire.varint import seal

    from tests.wire.hostile import accepts, sealed
    from tests.wire.logs import accepts_log


def one_frame(data: bytes) -> None:
    if len(data) >= 3:
        length, frame = (data[0] | data[1] << 8) & 0x03FF, data[3:]
        repairs = data[2] & 1 and len(frame) > 4
        accepts(sealed(frame[:-4], length) if repairs else frame, length)


def one_log(data: bytes) -> None:
    if len(data) >= 6:
        frame = seal(data[1:-4]) if data[0] & 1 else data[1:]
        with np.errstate(all="ignore"):
            accepts_log(frame, "auto" if data[0] & 2 else "lean")


TARGETS = {"frames": one_frame, "logs": one_log}


def main() -> None:
    """Run until stopped, or as long as libFuzzer's options say."""
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
