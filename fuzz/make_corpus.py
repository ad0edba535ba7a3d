"""Write the seeds of both corpora: small good frames, and short ones that claim much."""

from __future__ import annotations

from pathlib import Path

from aqg.wire.entry import encode_log, encode_snapshot

from tests.wire.hostile import good_frames, starved_frames
from tests.wire.logs import entries, start

HERE = Path(__file__).parent
MOST_VALUES = 1023
"""The fuzzer expects no more."""


def main() -> None:
    """Write every twelfth good frame, none of them above 1 KB, and every twelfth short one."""
    for name, frames in (("seed", good_frames()), ("starved", starved_frames(MOST_VALUES))):
        for index, (frame, length) in enumerate(frames):
            if index % 12 == 0 and len(frame) < 1000:
                head = bytes([length & 255, length >> 8, 1])
                (HERE / "corpus" / f"{name}-{index:03}").write_bytes(head + frame)
    for index, recipe in enumerate(("lean", "auto")):
        kind, (written, after) = bytes([1 + 2 * index]), entries(start(recipe))
        logs = [encode_log(1, written[: number + 1]) for number in range(len(written))]
        logs += [encode_snapshot(after, base) for base in (start().parameters, None)]
        for number, log in enumerate(logs):
            (HERE / "corpus-log" / f"log-{index}-{number:02}").write_bytes(kind + log)


if __name__ == "__main__":
    main()
