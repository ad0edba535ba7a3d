"""Every recipe does what it did when it was last changed on purpose, bit for bit."""

import gzip
import json
import platform
from functools import cache

import pytest

from aqg.core.recipes import RECIPES
from aqg.sim.reference import ReferenceSimulation

from tests.sim.record_runs import FILE, OPTIMIZERS, SETTINGS, play, simulate


@cache
def recorded():
    return json.loads(gzip.decompress(FILE.read_bytes()))


def expect(case, result):
    """Models may differ in their last bits where another processor adds in another order."""
    expected = recorded()["runs"][case]
    assert result["widths"] == expected["widths"], case
    assert result["bytes"] == expected["bytes"], case
    if platform.machine() == expected["machine"]:
        assert result["models"] == expected["models"], case


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_engine_does_what_it_did(name):
    for setting in ("sampled", "dropouts"):
        case = f"{name}/{setting}/sgd/float64"
        expect(case, play(simulate(case)))


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_engine_does_what_it_did_in_every_setting(name, dtype):
    for setting in SETTINGS:
        for optimizer in OPTIMIZERS if dtype == "float64" else OPTIMIZERS[:1]:
            case = f"{name}/{setting}/{optimizer}/{dtype}"
            expect(case, play(simulate(case)))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["auto", "aqg-2", "dadaquant", "ef21-m"])
def test_the_reference_does_what_the_engine_did(name, setting):
    case = f"{name}/{setting}/adam/float64"
    expect(case, play(simulate(case, ReferenceSimulation)))
