"""The names users may rely on, and what the library needs to be imported."""

import sys
from typing import get_args

import pytest

import aqg
import aqg.protocol
import aqg.sim
from aqg.core.messages import Message

from tests.commands import run

# Changing these is a decision: note it in CHANGELOG.
TOP = """
    SGD Adam AqgError BlockUpload ClientSession ConfigError DataError DenseUpload GradientError
    HalfUpload MessageError Momentum Receipt Recipe RotatedUpload RunError ServerSession Skip
    SparseUpload Upload WireError __version__ decode encode load_model make_recipe register
"""
PROTOCOL = "ClientSession Receipt ServerSession"
SIM = "FastSimulation LocalTraining Problem ReferenceSimulation RoundRecord Samples Training"


def test_public_names_are_these():
    assert set(aqg.__all__) == set(TOP.split())
    assert set(aqg.sim.__all__) == set(SIM.split())
    assert set(aqg.protocol.__all__) == set(PROTOCOL.split())
    for module in (aqg, aqg.sim, aqg.protocol):
        for name in module.__all__:
            assert hasattr(module, name), name


def test_decode_returns_only_exported_types():
    for kind in get_args(Message):
        assert getattr(aqg, kind.__name__) is kind


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("aqg, aqg.core.recipes, aqg.wire", "torch sklearn matplotlib rich typer pooch"),
        ("aqg.channel.client, aqg.channel.server, aqg.protocol", "flwr torch aqg.runs"),
        ("aqg.cli.app, aqg.sim, aqg.studies.sweep", "torch sklearn matplotlib flwr ray"),
    ],
)
def test_what_is_heavy_or_optional_is_imported_where_it_is_needed(modules, heavy):
    """The library needs numpy and numba; a command or a worker starts without what takes long."""
    code = f"import sys, {modules}; print(set({heavy.split()}) & set(sys.modules))"
    assert run(sys.executable, "-c", code) == "set()\n"
