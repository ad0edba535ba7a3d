"""Who is away when."""

import numpy as np
import pytest

from aqg.errors import ConfigError
from aqg.sim.training import Absence, BernoulliDropout, ScriptedDropout


def test_rate_is_met_and_rounds_differ():
    dropout = BernoulliDropout(0.3, seed=1)
    away = np.array([dropout.dropped(k, 50) for k in range(1, 201)])
    assert away.mean() == pytest.approx(0.3, abs=0.02)
    assert len({tuple(row) for row in away}) == 200


def test_a_round_does_not_depend_on_the_ones_before():
    dropout = BernoulliDropout(0.5, seed=4)
    late = dropout.dropped(90, 10)
    dropout.dropped(1, 10)
    assert np.array_equal(dropout.dropped(90, 10), late)
    assert not np.array_equal(BernoulliDropout(0.5, seed=5).dropped(90, 10), late)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rate_is_bounded(rate):
    with pytest.raises(ConfigError, match="at least 0 and below 1"):
        BernoulliDropout(rate)


def test_script_adds_to_chance():
    script = ScriptedDropout((Absence(0, 5, 6), Absence(9, 1, 99)), BernoulliDropout(0.2, seed=2))
    assert script.rate == 0.2
    assert [bool(script.dropped(k, 4)[0]) for k in (5, 6)] == [True, True]
    random = BernoulliDropout(0.2, seed=2)
    assert np.array_equal(script.dropped(7, 4), random.dropped(7, 4))


@pytest.mark.parametrize("absence", [(-1, 1, 2), (0, 0, 2), (0, 3, 2)])
def test_absences_are_checked(absence):
    with pytest.raises(ConfigError, match="absence of client"):
        Absence(*absence)
