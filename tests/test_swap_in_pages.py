"""The tables of README and of the pages on swapping in are those of the stored runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aqg.studies.swap_in.results import main

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import readme  # noqa: E402


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_runs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert readme.refreshed(page) == text


def test_savings_and_delays_are_those_that_the_script_wrote() -> None:
    for task in readme.TASKS:
        plain, runs = readme.read_runs(task, "fedavg"), readme.read_runs(task, "auto")
        assert [run.seed for run in plain] == [run.seed for run in runs]
        assert len(runs) >= 3
        for base, run in zip(plain, runs, strict=True):
            spent = base.upload_bytes + base.download_bytes
            saving = spent / (run.upload_bytes + run.download_bytes)
            assert abs(saving / run.saving - 1) < 0.01
            assert base.target == run.target


def test_the_measures_tables_are_those_of_its_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/explanation/measure.md").read_text(encoding="utf-8")
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    main([str(tmp_path / "page.md"), str(ROOT / "results/swap-in-compare")])
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text
