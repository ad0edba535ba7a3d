"""How large a report is, and how long it takes to make and to open.

    python benchmarks/report.py                       # 10 recipes x 5 seeds x 4000 rounds
    python benchmarks/report.py --rounds 400 --seeds 2

The runs are made up, but written by the code that writes real ones: noisy losses that fall to a
known minimum, clients that speak less and less, random absences. The report is opened from disk in
headless Chromium, which must be installed; "drawn" is the browser's own clock, from the start of
navigation until every plot and table is there, the best of three.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from aqg.report.write import write_report
from aqg.runs.config import RunConfig
from aqg.runs.cost import ClientBytes
from aqg.runs.directory import ROUNDS, SUMMARY, Line
from aqg.runs.files import seal, to_json, write_atomically
from aqg.runs.loop import create_run, slug
from aqg.runs.stopping import summarize
from aqg.sim.record import DROPPED, RoundRecord

RECIPES = ("lean", "gd", "laq", "aqg", "aqg-2", "qgd", "lag", "qsgd", "signsgd", "onebit")
MINIMUM = 0.5
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def make_lines(recipe: int, seed: int, num_rounds: int, num_clients: int) -> list[Line]:
    """Make up a run: what it sends becomes rarer and its loss falls, with noise."""
    draw = np.random.default_rng((recipe, seed))
    rounds = np.arange(num_rounds)
    noise = np.exp(draw.normal(0, 0.1, num_rounds))
    losses = MINIMUM + 2 * np.exp(-rounds * (6 + recipe) / num_rounds) * noise
    chance = 1.0 if recipe == 1 else 0.05 + 0.95 * np.exp(-rounds / (50.0 * (recipe + 1)))
    widths = draw.integers(1, 5, (num_rounds, num_clients))
    widths = np.where(
        draw.random(widths.shape) < np.broadcast_to(chance, num_rounds)[:, None], widths, 0
    )
    widths[draw.random(widths.shape) < 0.2] = DROPPED
    present = widths != DROPPED
    sent = np.where(present, np.maximum(widths, 0) * 800 + 1, 0)
    received = np.where(present, 62_808, 0)
    accuracies = 0.9 - 0.8 * np.exp(-rounds / 100)
    every = max(1, num_rounds // 50)
    return [
        Line(
            RoundRecord(
                k + 1,
                float(losses[k]),
                tuple(widths[k].tolist()),
                int(sent[k].sum()),
                download_bytes=int(received[k].sum()),
                client_upload_bytes=tuple(sent[k].tolist()),
                client_download_bytes=tuple(received[k].tolist()),
            ),
            {"accuracy": float(accuracies[k])} if k % every == 0 else {},
        )
        for k in range(num_rounds)
    ]


def make_runs(root: Path, recipes: tuple[str, ...], seeds: int, rounds: int, clients: int) -> None:
    for index, recipe in enumerate(recipes):
        for seed in range(seeds):
            directory = root / f"{slug(recipe)}_seed-{seed}"
            config = RunConfig(
                recipe=recipe,
                dataset="mnist",
                partition="iid",
                model="softmax",
                clients=clients,
                rounds=rounds,
                alpha=0.02,
                seed=seed,
                target=1e-2,
            )
            create_run(directory, config)
            lines = make_lines(index, seed, rounds, clients)
            text = "".join(seal(line.to_json()) + "\n" for line in lines)
            write_atomically(directory / ROUNDS, text.encode())
            summary = summarize(
                recipe, lines, MINIMUM + 1e-3, {"accuracy": 0.9}, MINIMUM, config.goal
            )
            client_bytes = ClientBytes(clients)
            for line in lines:
                client_bytes.add(line.record)
            row = summary | client_bytes.to_json()
            write_atomically(directory / SUMMARY, to_json(row).encode())


def open_report(path: Path, chromium: str) -> tuple[float, int]:
    """Return the seconds until everything was drawn, and the number of plots."""
    from playwright.sync_api import sync_playwright

    seconds = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=list(CHROMIUM_ARGUMENTS)
        )
        for _ in range(3):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(path.resolve().as_uri())
            page.wait_for_function("document.documentElement.dataset.ready")
            seconds.append(int(page.evaluate("document.documentElement.dataset.ready")) / 1000)
            num_plots = page.locator(".plot svg").count()
            page.close()
        browser.close()
    return min(seconds), num_plots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", type=int, default=len(RECIPES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--keep", type=Path, help="leave the report here")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("needs chromium on the path")
    recipes = RECIPES[: options.recipes]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_runs(root / "runs", recipes, options.seeds, options.rounds, options.clients)
        begun, begun_cpu = time.perf_counter(), time.process_time()
        page = options.keep or root / "report.html"
        write_report([root / "runs"], page)
        making, making_cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
        opening, num_plots = open_report(page, chromium)
        size = page.stat().st_size
    print(
        f"{len(recipes)} recipes x {options.seeds} seeds x {options.rounds} rounds, "
        f"{options.clients} clients"
    )
    print(f"size   {size / 1e6:6.2f} MB")
    print(f"made   {making:6.2f} s   ({making_cpu:.2f} s of CPU time)")
    print(f"drawn  {opening:6.2f} s   ({num_plots} plots)")


if __name__ == "__main__":
    main()
