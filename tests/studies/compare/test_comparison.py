"""What a comparison consists of, on disk and when it grows."""

from __future__ import annotations

import pytest

from aqg.errors import ConfigError, RunError
from aqg.studies.compare.comparison import Comparison, create_comparison, open_comparison
from aqg.studies.compare.tasks import select_tasks

SOFTMAX, LOCAL = select_tasks(["digits-softmax", "digits-local"])


def test_a_plan_survives_its_directory(tmp_path):
    comparison = Comparison(
        (SOFTMAX, LOCAL), ("stc", "lean:xi=3"), seeds=4, search=True, quick=True
    )
    create_comparison(tmp_path / "c", comparison)
    assert open_comparison(tmp_path / "c") == comparison
    with pytest.raises(RunError, match="is not empty"):
        create_comparison(tmp_path / "c", comparison)
    (tmp_path / "c" / "compare.json").write_text("{}")
    with pytest.raises(RunError, match=r"compare\.json' is damaged"):
        open_comparison(tmp_path / "c")
    with pytest.raises(RunError, match=r"is not a comparison's directory: it has no compare\.json"):
        open_comparison(tmp_path)


def test_a_comparison_can_grow():
    comparison = Comparison((LOCAL,), ("lean", "gd"), seeds=2, search=True)
    grown = comparison.extended([SOFTMAX, LOCAL], ["stc", "gd"], seeds=5)
    assert grown == Comparison((SOFTMAX, LOCAL), ("lean", "stc", "gd"), seeds=5, search=True)
    assert comparison.extended((), (), None) == comparison


def test_a_part_of_a_comparison():
    comparison = Comparison((SOFTMAX, LOCAL), ("lean", "stc", "gd"), seeds=2, search=True)
    assert comparison.narrowed((), ()) == comparison
    part = comparison.narrowed([LOCAL], ["gd", "lean"])
    assert list(part.pairs()) == [("lean", LOCAL), ("gd", LOCAL)]
    assert len(list(comparison.narrowed((), ["stc"]).pairs())) == 2
    assert len(list(comparison.narrowed([SOFTMAX], ()).pairs())) == 3


def test_seeds_must_be_some():
    with pytest.raises(ConfigError, match="seeds is 0; it must be at least 1"):
        Comparison((LOCAL,), ("gd",), seeds=0)
