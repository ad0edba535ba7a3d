"""Coverage-guided fuzzing of the model's log: see README.md beside this file.

The first byte of an input chooses the model that the reader holds, and whether the checksum is
repaired (so that the fuzzer gets past it); the rest is a log or a snapshot.

Numba is hidden, as in decode.py.
"""

from __future__ import annotations

import sys

import atheris

sys.modules["numba"] = None  # type: ignore[assignment]

with atheris.instrument_imports(include=["aqg.wire", "aqg.core.public", "aqg.core.messages"]):
    import numpy as np

    from aqg.core.optimizers import SGD, Adam
    from aqg.errors import WireError

    from tests.wire.logs import read_frame, sealed


def test_one_input(data: bytes) -> None:
    """Read; what is accepted must be whole and survive another round trip."""
    if len(data) < 6:
        return
    frame = data[1:]
    if data[0] & 1:
        frame = sealed(frame[:-4])
    try:
        with np.errstate(all="ignore"):
            read_frame(frame, "auto" if data[0] & 2 else "lean", Adam() if data[0] & 4 else SGD())
    except WireError:
        return


def main() -> None:
    """Run until stopped, or as long as libFuzzer's options say."""
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
