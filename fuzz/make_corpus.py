"""Write the seeds of the corpus: small good frames of all kinds, and short ones that claim much."""

from __future__ import annotations

from pathlib import Path

from tests.wire.hostile import good_frames, starved_frames

CORPUS = Path(__file__).parent / "corpus"
MOST_VALUES = 1023
"""The fuzzer expects no more."""


def main() -> None:
    """Write every twelfth good frame, none of them above 1 KB, and every twelfth short one."""
    for index, (frame, length) in enumerate(good_frames()):
        if index % 12 == 0 and len(frame) < 1000:
            head = bytes([length & 255, length >> 8, 1])
            (CORPUS / f"seed-{index:03}").write_bytes(head + frame)
    for index, (frame, length) in enumerate(starved_frames(MOST_VALUES)):
        if index % 12 == 0:
            head = bytes([length & 255, length >> 8, 1])
            (CORPUS / f"starved-{index:03}").write_bytes(head + frame)


if __name__ == "__main__":
    main()
