"""Every recipe does what it did when it was last changed on purpose, bit for bit."""

import gzip
import json
import platform
from functools import cache

import pytest

from aqg.sim.reference import ReferenceSimulation

from tests.problems import soak
from tests.sim.record_runs import FILE, SETTINGS, cases, play, simulate


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


PUSHED = tuple(f"/{setting}/sgd/float64" for setting in ("sampled", "dropouts"))


@pytest.mark.parametrize("case", [c if c.endswith(PUSHED) else soak(c) for c in cases()])
def test_the_engine_does_what_it_did(case):
    expect(case, play(simulate(case)))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["auto", "aqg-2", "dadaquant", "ef21-m"])
def test_the_reference_does_what_the_engine_did(name, setting):
    case = f"{name}/{setting}/adam/float64"
    expect(case, play(simulate(case, ReferenceSimulation)))
