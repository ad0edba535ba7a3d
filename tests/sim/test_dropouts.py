"""Who is away when."""

import numpy as np
import pytest

from aqg.errors import ConfigError
from aqg.sim.training import Dropout


def test_rate_is_met_and_rounds_differ():
    dropout = Dropout(0.3, seed=1)
    away = np.array([dropout.dropped(k, 50) for k in range(1, 201)])
    assert away.mean() == pytest.approx(0.3, abs=0.02)
    assert len({tuple(row) for row in away}) == 200


def test_a_round_does_not_depend_on_the_ones_before():
    dropout = Dropout(0.5, seed=4)
    late = dropout.dropped(90, 10)
    dropout.dropped(1, 10)
    assert np.array_equal(dropout.dropped(90, 10), late)
    assert not np.array_equal(Dropout(0.5, seed=5).dropped(90, 10), late)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rate_is_bounded(rate):
    with pytest.raises(ConfigError, match="at least 0 and below 1"):
        Dropout(rate)


def test_absences_add_to_chance():
    dropout = Dropout(0.2, seed=2, absences=((0, 5, 6), (9, 1, 99)))
    assert [bool(dropout.dropped(k, 4)[0]) for k in (5, 6)] == [True, True]
    assert np.array_equal(dropout.dropped(7, 4), Dropout(0.2, seed=2).dropped(7, 4))


@pytest.mark.parametrize("absence", [(-1, 1, 2), (0, 0, 2), (0, 3, 2)])
def test_absences_are_checked(absence):
    with pytest.raises(ConfigError, match="absence of client"):
        Dropout(absences=(absence,))
