"""The names users may rely on, and what the library needs to be imported."""

from __future__ import annotations

import subprocess
import sys

import aqg


def test_public_names_exist_and_are_pinned():
    for name in aqg.__all__:
        assert hasattr(aqg, name), name
    assert len(aqg.__all__) == 47  # changing the public surface is a decision: note it in CHANGELOG


def test_core_and_wire_need_numpy_and_numba_only():
    code = (
        "import sys, aqg, aqg.core.recipes, aqg.wire\n"
        "heavy = {'torch', 'sklearn', 'matplotlib', 'rich', 'typer', 'pooch'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
