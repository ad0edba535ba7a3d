"""Write the seeds of both corpora: small good frames, and short ones that claim much."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from aqg.core.optimizers import SGD, Adam
from aqg.wire.entry import encode_log, encode_snapshot

from tests.wire.hostile import good_frames, starved_frames
from tests.wire.logs import entries, start

CORPUS = Path(__file__).parent / "corpus"
LOG_CORPUS = Path(__file__).parent / "corpus-log"
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
    LOG_CORPUS.mkdir(exist_ok=True)
    for index, (recipe, optimizer) in enumerate(product(("lean", "auto"), (SGD(), Adam()))):
        kind = bytes([1 + 2 * (recipe == "auto") + 4 * isinstance(optimizer, Adam)])
        written, after = entries(start(recipe, optimizer))
        for number in range(len(written)):
            log = encode_log(1, written[: number + 1])
            (LOG_CORPUS / f"log-{index}-{number:02}").write_bytes(kind + log)
        for name, base in (("relative", start().parameters), ("whole", None)):
            snapshot = encode_snapshot(after, base)
            (LOG_CORPUS / f"snapshot-{index}-{name}").write_bytes(kind + snapshot)


if __name__ == "__main__":
    main()
