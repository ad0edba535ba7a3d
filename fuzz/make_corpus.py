"""Write the seeds of the corpus: one small good frame per mode, section method and width."""

from __future__ import annotations

from pathlib import Path

from tests.wire.hostile import good_frames

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    """Write every twelfth good frame, none of them above 1 KB."""
    for index, (frame, length) in enumerate(good_frames()):
        if index % 12 == 0 and len(frame) < 1000:
            head = bytes([length & 255, length >> 8, 1])
            (CORPUS / f"seed-{index:03}").write_bytes(head + frame)


if __name__ == "__main__":
    main()
