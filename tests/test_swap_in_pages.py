"""What README, docs/explanation/swap-in.md and docs/explanation/measure.md say is what the stored runs say."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import geometric_mean, mean

from aqg.studies.swap_in.results import main

ROOT = Path(__file__).parents[1]
TASKS = ("digits-local", "local-iid", "local-dirichlet", "sampled-dirichlet")


def runs(task: str, recipe: str) -> list[dict[str, str]]:
    with (ROOT / "results/swap-in/table.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == task]
    return [row for row in rows if row["recipe"].partition("@")[0] == recipe]


def total(row: dict[str, str]) -> float:
    return (int(row["upload_bytes"]) + int(row["download_bytes"])) / 1e6


def rows_of(page: str, heading: str) -> list[list[str]]:
    table = page[page.index(heading) :].split("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]


def megabytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"kB": 1e-3, "MB": 1.0}[unit]


def test_swap_is_what_its_runs_say() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/explanation/swap-in.md").read_text(encoding="utf-8")
    short = rows_of(readme, "| task | averaging: rounds, bytes | `swap`")
    long = rows_of(page, "| task | averaging: rounds, bytes | rounds")
    for task, (_, averaging, delay, cost, saving), row in zip(TASKS, short, long, strict=True):
        found, plain = runs(task, "swap"), runs(task, "fedavg")
        assert len(found) == len(plain) == 3
        rounds, bytes_ = averaging.split(", ")
        assert rounds == f"{mean(int(r['rounds']) for r in plain):.0f}"
        assert abs(megabytes(bytes_) / mean(map(total, plain)) - 1) < 0.01
        assert delay == f"{geometric_mean(float(r['delay']) for r in found):.2f}"
        assert abs(megabytes(cost) / mean(map(total, found)) - 1) < 0.01
        assert saving == f"{geometric_mean(float(r['saving']) for r in found):,.0f}"
        assert row[:2] == [task, averaging]
        assert row[2] == f"{mean(int(r['rounds']) for r in found):.0f}"
        pace = {r["seed"]: int(r["rounds"]) for r in plain}
        delays = sorted(int(r["rounds"]) / pace[r["seed"]] for r in found)
        assert row[3] == f"{delay} ({delays[0]:.2f} to {delays[-1]:.2f})"
        assert row[4] == cost
        savings = sorted(float(r["saving"]) for r in found)
        assert row[5] == f"{saving} ({savings[0]:,.0f} to {savings[-1]:,.0f})"


def test_the_measures_tables_are_those_of_its_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/explanation/measure.md").read_text(encoding="utf-8")
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    main([str(tmp_path / "page.md"), str(ROOT / "results/swap-in-compare")])
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text
