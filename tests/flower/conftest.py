"""What all tests of Flower begin with."""

import random

import pytest


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    """Give nodes a state of their own, and strategies, which shuffle nodes, the same numbers."""
    monkeypatch.setenv("AQG_STATE_DIR", str(tmp_path / "state"))
    random.seed(0)
