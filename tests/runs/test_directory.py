"""Where results go."""

import datetime
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from aqg.errors import RunError
from aqg.runs import directory as rundir
from aqg.runs.directory import output_directory


@pytest.fixture
def one_second(tmp_path, monkeypatch):
    """Everything happens in the same second, in an empty directory."""

    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 5, 6, 7, 8, 9, tzinfo=tz)

    monkeypatch.setattr(rundir, "datetime", Stopped)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_of_the_same_second_are_numbered(one_second):
    for _ in range(3):
        with output_directory(None, "digits") as directory:
            (directory / "config.toml").touch()
    names = sorted(path.name for path in (one_second / "runs").iterdir())
    assert names == [f"digits-20240506-070809{end}" for end in ("", "-2", "-3")]


def test_commands_started_together_do_not_share_a_directory(one_second):
    with ExitStack() as stack, ThreadPoolExecutor(16) as pool:

        def claim(_):
            return stack.enter_context(output_directory(None, "digits"))

        assert len(set(pool.map(claim, range(64)))) == 64
    assert list(one_second.iterdir()) == []  # nothing was written to them


def test_a_directory_that_stayed_empty_is_taken_away(one_second):
    with pytest.raises(KeyError), output_directory(None, "digits") as directory:
        raise KeyError(directory.stat())
    assert list(one_second.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "message"),
    [(Path(), "is not empty; name another"), (None, r"'runs/digits-.*' cannot be made")],
)
def test_a_place_that_is_taken_is_refused_before_the_work(one_second, place, message):
    (one_second / "runs").touch()
    with pytest.raises(RunError, match=message), output_directory(place, "digits"):
        pytest.fail("the work began")
