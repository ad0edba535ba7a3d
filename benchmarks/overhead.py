"""Rounds and bytes until the target, where the transport adds bytes of its own to every message.

With local training and ``keep=0``, messages of a few coordinates take many rounds. Told what a
message costs besides, ``auto`` sends more at a time.

    python benchmarks/overhead.py [--data-dir DIR]

prints both, with the payload alone and with the transport.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from aqg.runs.executor import Contact
from aqg.runs.table import format_bytes
from aqg.runs.tasks import Train
from aqg.studies.compare.tasks import TASKS
from aqg.studies.compare.trial import Outcome, Setting, Trial

NAMES = ("local-iid", "local-dirichlet")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="where datasets are kept")
    parser.add_argument("--overhead", type=int, default=12_000, help="bytes; Flower's by default")
    options = parser.parse_args()
    print("| task | step | recipe | rounds | payload | with the transport |")
    print("|---|---|---|---|---|---|")
    for name in NAMES:
        for multiplier in (1, 2):
            for recipe in ("auto:keep=0", f"auto:keep=0:overhead={options.overhead}"):
                outcome = run(name, recipe, multiplier, options.data_dir)
                num_messages = outcome.rounds * TASKS[name].config.clients
                total = outcome.upload_bytes + num_messages * options.overhead
                rounds = outcome.rounds if outcome.ending == "reached" else f"> {outcome.rounds}"
                print(
                    f"| {name} | ×{multiplier} | `{recipe}` | {rounds} | "
                    f"{format_bytes(outcome.upload_bytes)} | {format_bytes(total)} |",
                    flush=True,
                )


def run(name: str, recipe: str, multiplier: float, data_dir: Path | None) -> Outcome:
    """Run a task to its end, on seed 0."""
    task = TASKS[name]
    trial = Trial(name, recipe, Setting(recipe, multiplier=multiplier), seed=0)
    with tempfile.TemporaryDirectory() as directory:
        run = Train(trial.config(task, "cpu"), None, Path(directory), data_dir, keeps_models=False)
        return Outcome.of_run(trial, run(Contact()))


if __name__ == "__main__":
    main()
