"""The numbers of docs/explanation/downlink.md are those of the runs in results/downlinks."""

import csv
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[1]


def measured():
    """Return megabytes and rounds, medians of the seeds, by task, clients and downlink."""
    found = {}
    with (ROOT / "results/downlinks/runs.csv").open() as file:
        for row in csv.DictReader(file):
            assert row["reached"] == "1"
            total = (int(row["upload_bytes"]) + int(row["download_bytes"])) / 1e6
            key = (row["task"], int(row["clients"]), row["downlink"])
            found.setdefault(key, []).append((total, int(row["rounds"])))
    return {
        key: tuple(map(statistics.median, zip(*rows, strict=True))) for key, rows in found.items()
    }


def rows_of(page, heading):
    table = page[page.index(heading) :].split("\n\n")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [[cell.strip().strip("*") for cell in line] for line in lines]


def check(text, value):
    """Compare a number with as many digits as the page has."""
    digits = len(text.partition(".")[2])
    assert text == f"{value:.{digits}f}"


def test_the_tables_are_the_data():
    page = (ROOT / "docs/explanation/downlink.md").read_text()
    runs = measured()
    used = set()

    def compare(key, total, rounds):
        used.add(key)
        check(total, runs[key][0])
        check(rounds, runs[key][1])

    for row in rows_of(page, "| task | `full`"):
        task = row[0].split("`")[1]
        clients = 100 if "of 100" in row[0] else 10
        if row[2]:
            compare((task, clients, "exact"), row[2], row[4])
            asked = 10 * 636_040 * int(row[4]) / 1e6
            check(row[1], asked)
        compare((task, clients, "condensed"), row[3], row[5])
    for row in rows_of(page, "| clients | `exact`"):
        clients = int(row[0].split(", ")[0].replace(",", ""))
        task = "digits-local" if clients < 1000 else "sampled-iid"
        downlink = row[0].split("`")[1] if "`" in row[0] else "condensed"
        if row[1]:
            compare((task, clients, "exact"), row[1], row[3])
        compare((task, clients, downlink), row[2], row[4])
    assert set(runs) == used
