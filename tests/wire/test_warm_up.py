"""After `warm_up`, no message meets a kernel that has not been compiled."""

import sys
from pathlib import Path

import pytest

from tests.commands import run

SCRIPT = """
import pkgutil, importlib
import numpy as np
import aqg.wire
from aqg.core.grids import Grid, level_dtype, num_levels
from aqg.core.messages import DenseUpload, Upload
from aqg.wire import Known, decode, encode, encoded_size, warm_up
from tests.wire.samples import FIELD_MODES, field_message

def compiled():
    names = [m.name for m in pkgutil.iter_modules(aqg.wire.__path__)]
    modules = [importlib.import_module("aqg.wire." + name) for name in names]
    return {
        (module.__name__, name): len(kernel.signatures)
        for module in modules
        for name, kernel in vars(module).items()
        if hasattr(kernel, "signatures")
    }

warm_up()
before = compiled()
assert any(before.values())
random = np.random.default_rng(0)
for width in range(1, 17):
    for grid in Grid:
        for length in (0, 1, 500, 300_000 if width < 5 else 20_000):
            spread = random.normal(0, 0.2 * 2 ** (width / 2), length)
            bound = num_levels(grid, width)
            levels = np.clip(np.rint(spread + (bound - 1) / 2), 0, bound - 1)
            levels = levels.astype(level_dtype(width))
            levels.flags.writeable = bool(width % 2)
            message = Upload(levels[::-1] if width % 3 else levels, 1.0, width, grid)
            frame = encode(message)
            assert len(frame) == encoded_size(message)
            for kind in (bytes, bytearray, memoryview):
                assert decode(kind(frame), length) == message
            known = Known(spread.astype(np.float32))
            assert decode(encode(message, known=known), length, known=known) == message
for length in (0, 1, 500, 20_000):
    for mode in FIELD_MODES:
        message = field_message(mode, random.standard_normal(length))
        assert decode(encode(message), length) == message
dense = DenseUpload(random.normal(size=1000).astype(np.float32))
assert decode(encode(dense), 1000) == dense
after = compiled()
assert after == before, {name: after[name] for name in after if after[name] != before[name]}
print("ok")
"""


@pytest.mark.soak
def test_warm_up_compiles_everything():
    root = Path(__file__).parents[2]
    assert run(sys.executable, "-W", "error", "-c", SCRIPT, cwd=root) == "ok\n"
