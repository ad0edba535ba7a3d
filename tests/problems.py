"""Small problems that tests train on."""

from dataclasses import replace
from itertools import cycle, product
from typing import NamedTuple

import numpy as np
import pytest

from aqg.core.downlink import Condensed, Exact
from aqg.core.optimizers import Adam, Momentum
from aqg.core.recipes import RECIPES, make_recipe
from aqg.core.step_sizes import DistanceOverGradients
from aqg.objectives import make_objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.simulation import SimulationState
from aqg.sim.training import Dropout, LocalTraining, Training

_FEW = ["aqg-2", "auto", "clag", "dadaquant", "dgc", "econtrol", "eden", "ef21-m", "gd", "lag"]
_FEW += ["lean", "onebit", "qsgd"]
_OTHERS = [name for name in RECIPES if name not in _FEW]


def soak(*values):
    """Mark a case that a push does without."""
    return pytest.param(*values, marks=pytest.mark.soak)


def crossed(*axes):
    """Give all combinations; those after the first in which each value occurs are for a soak."""
    count = max(map(len, axes))
    first = {tuple(k % len(axis) for axis in axes) for k in range(count)}
    return [
        (pytest.param if places in first else soak)(
            *(a[p] for a, p in zip(axes, places, strict=True))
        )
        for places in product(*(range(len(axis)) for axis in axes))
    ]


def some_recipes(*beside):
    """Give recipes with every memory, rule, stage and kind of upload; the others are for a soak.

    Each with one of the values beside it, in turn. What no recipe changes is tested so; that each
    does what it did, bit for bit, is in `tests/sim/test_record.py`.
    """
    turn = cycle([(value,) for value in beside] or [()])
    few = [pytest.param(name, *next(turn)) for name in _FEW]
    return few + [soak(name, *next(turn)) for name in _OTHERS]


SOME_RECIPES = some_recipes()

LOCAL = LocalTraining(batch_size=8, steps=5, rate=0.05)
NATURAL = 0.05 * 5 / 6
"""Of six clients that train so, the step of federated averaging."""
AWAY = Dropout(absences=((1, 3, 14), (3, 8, 19)))
LOST = Dropout(0.3, seed=8)


class Setting(NamedTuple):
    """How six clients of a `tiny_problem` train."""

    training: Training = Training()
    step: float = 0.05
    dropout: Dropout | None = LOST


SETTINGS = {
    "paper": Setting(step=0.1, dropout=None),
    "dropouts": Setting(dropout=replace(LOST, absences=AWAY.absences)),
    "minibatch": Setting(Training(LocalTraining(batch_size=8))),
    "steps": Setting(Training(LocalTraining(steps=3, rate=0.05))),
    "minibatch steps": Setting(Training(LOCAL)),
    "epochs": Setting(Training(LocalTraining(batch_size=8, epochs=2, rate=0.05))),
    "weights": Setting(Training(weighting="samples")),
    "sampling": Setting(Training(participation=0.5)),
    "momentum": Setting(Training(optimizer=Momentum())),
    "adam": Setting(Training(optimizer=Adam())),
    "everything": Setting(  # momentum with stale and noisy directions wants short steps
        Training(LOCAL, Momentum(), "samples", 0.5), 0.01
    ),
    "exact": Setting(Training(LOCAL, Momentum(0.5), participation=0.7, downlink=Exact())),
    "exact, away": Setting(Training(downlink=Exact(), participation=0.5), dropout=AWAY),
    "condensed": Setting(Training(LOCAL, Momentum(0.5), downlink=Condensed())),
    "condensed, away": Setting(
        Training(LocalTraining(), Adam(), "samples", 0.5, Condensed()), 0.02, AWAY
    ),
    "dog": Setting(Training(LOCAL, step=DistanceOverGradients()), NATURAL, None),
    "dog, exact": Setting(
        Training(LOCAL, Adam(), "samples", downlink=Exact(), step=DistanceOverGradients()), NATURAL
    ),
    "dog, condensed": Setting(
        Training(LOCAL, participation=0.5, downlink=Condensed(), step=DistanceOverGradients()),
        NATURAL,
    ),
}


def in_setting(recipe, name, dtype="float64"):
    """Return the arguments of both engines in a setting, and their options."""
    training, step, dropout = SETTINGS[name]
    problem = tiny_problem(dtype, num_clients=6, unequal=name != "paper")
    return (problem, make_recipe(recipe, max_staleness=8), step, dropout, 4), {"training": training}


def settings(*few):
    """Cross some recipes with all settings, or with a few; others have one setting."""
    others = [soak(name, "dropouts") for name in _OTHERS]
    return crossed(_FEW, few) if few else crossed(_FEW, list(SETTINGS)) + others


def tiny_problem(
    dtype="float64", num_clients=4, l2=0.1, unequal=False, model="softmax", scaling="mean"
):
    """Random data: 6 features, 3 classes (2 for ``logistic``), each client with its own bias."""
    rng = np.random.default_rng(11)
    num_classes = 2 if model == "logistic" else 3
    objective = make_objective(model, 6, num_classes, l2, scaling)
    centers = rng.standard_normal((3, 6))
    clients = []
    for client in range(num_clients):
        size = 20 + (7 * client if unequal else 0)
        labels = rng.choice(3, size, p=np.roll([0.7, 0.2, 0.1], client))
        features = centers[labels] + rng.standard_normal((size, 6))
        clients.append(Samples(features.astype(dtype), labels.astype(np.int64) % num_classes))
    initial = objective.init_params(3).astype(dtype)
    return Problem(objective, tuple(clients), initial, test=clients[0])


def check_engines(*arguments, rounds, **options):
    """Both engines do the same, to the last bit, and so do those that go on from the other's state.

    Two clients are in a block, so that a round takes several.
    """
    size = {"block_bytes": 2 * arguments[0].initial_params.nbytes}
    reference, restored = (ReferenceSimulation(*arguments, **options) for _ in range(2))
    fast, resumed = (FastSimulation(*arguments, **options, **size) for _ in range(2))
    stop = 2 * rounds // 3
    for number in range(rounds):
        if number == stop:
            resumed.restore(SimulationState.from_arrays(reference.state().to_arrays()))
            restored.restore(SimulationState.from_arrays(fast.state().to_arrays()))
        expected = reference.run_round()
        for one in (fast, resumed, restored) if number >= stop else (fast,):
            assert one.run_round() == expected
    for one in fast, resumed, restored:
        assert_same(one, reference)
    for m, client in enumerate(reference.clients):
        assert client.track.position[0].tobytes() == reference.server.mirror(m).tobytes()
    return reference, fast


def check_torch(*arguments, rounds, device="torch:cpu", rel=1e-9, **options):
    """Tensors of torch take the same decisions as arrays of NumPy, to almost the same model."""
    arrays = FastSimulation(*arguments, **options)
    tensors = FastSimulation(*arguments, device=device, **options)
    for _ in range(rounds):
        expected, found = arrays.run_round(), tensors.run_round()
        assert found.widths == expected.widths
        assert found.download_bytes == pytest.approx(expected.download_bytes, rel=0.02)
    assert tensors.parameters == pytest.approx(arrays.parameters, rel=rel, abs=rel)
    tensors.restore(arrays.state())
    assert_same_state(tensors, arrays)


def assert_same(one, other, rounds=0):
    """Both do the same in so many rounds, and come to the same state, to the last bit."""
    for _ in range(rounds):
        assert one.run_round() == other.run_round()
    assert one.loss() == other.loss()
    assert_same_state(one, other)


def assert_same_state(one, other):
    expected = other.state().to_arrays()
    for key, value in one.state().to_arrays().items():
        assert np.array_equal(value, expected[key]), key
