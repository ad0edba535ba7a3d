"""The tables of README and of the pages on swapping in are those of the stored runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aqg.runs.table import format_bytes
from aqg.studies.swap_in.comparison import open_swap_in
from aqg.studies.swap_in.plan import Findings, read_outcomes
from aqg.studies.swap_in.results import main

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import readme  # noqa: E402

if TYPE_CHECKING:
    from aqg.studies.swap_in.tasks import SwapTask


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


def _found(folder: Path) -> tuple[Findings, dict[str, SwapTask]]:
    comparison = open_swap_in(folder)
    findings = Findings(comparison, read_outcomes(folder))
    return findings, {task.name: task for task in comparison.tasks}


def test_other_settings_cost_what_the_page_says() -> None:
    """STC on CIFAR-10 with the step that sets itself, and the least it needs with a fixed one."""
    text = " ".join((ROOT / "docs/explanation/swap-in.md").read_text(encoding="utf-8").split())
    findings, tasks = _found(readme.LARGE)
    ranks = findings.ranks("stc", tasks["cifar10"])
    cost = next(c for s, (bad, c) in ranks.items() if not bad and not s.multiplier)
    assert f"and {format_bytes(int(cost))} instead of 3.32 GB" in text
    findings, tasks = _found(readme.MNIST)
    costs = []
    for name in ("local-iid", "local-dirichlet"):
        ranks = findings.ranks("stc", tasks[name])
        costs += [min(c for s, (bad, c) in ranks.items() if not bad and s.multiplier)]
    least, most = (format_bytes(int(cost)) for cost in costs)
    assert f"STC needs {least} on `local-iid` and {most} on `local-dirichlet`" in text
    ranks = findings.ranks("stc", tasks["sampled-dirichlet"])
    assert min(rank for s, rank in ranks.items() if s.multiplier) == (1, 1.78)
