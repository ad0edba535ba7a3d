"""Fixtures shared by all tests."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about the code.
for profile, examples in (("push", 50), ("soak", 300)):
    settings.register_profile(
        profile, deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("push")  # `make soak` gives --hypothesis-profile=soak


def pytest_collection_finish():
    """Spare what is loaded by now from all later searches for garbage."""
    gc.freeze()


def pytest_ignore_collect(collection_path):
    """Import no helper for the doctests that it may have."""
    is_helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_helper else None


@pytest.fixture(scope="session")
def data_dir():
    """Return a directory with the real files of ``mnist`` and ``heterogeneous``, or skip."""
    chosen = os.environ.get("AQG_DATA_DIR")
    # Without the setting: a data directory next to the checkout.
    directory = Path(chosen) if chosen else Path(__file__).parents[2] / "shared" / "data"
    if not directory.is_dir():
        pytest.skip("needs the data files: set AQG_DATA_DIR to a directory that holds them")
    return directory
