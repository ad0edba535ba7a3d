"""What is compiled, when, and where it is kept."""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

import aqg

from tests.commands import run

ROOT = Path(__file__).parents[1]

ONE_KERNEL = """
import numpy as np
from aqg.jit import when_compiling
from aqg.wire.payloads import _read

def pack():
    _read(np.zeros(8, np.uint8), np.ones(9, np.uint8), 2, 1)

with when_compiling(lambda: print("compiling")):
    pack()
    pack()
print("done")
"""

RUNS = """
import importlib, pkgutil
import aqg
from aqg.core.recipes import make_recipe
from aqg.sim.engine import FastSimulation
from tests.problems import tiny_problem

for name in ("auto", "gd", "laq"):
    for _ in FastSimulation(tiny_problem(), make_recipe(name), step_size=0.1).run_rounds(15):
        pass

for module in pkgutil.walk_packages(aqg.__path__, "aqg."):
    if module.name.startswith(("aqg.wire.", "aqg.core.")):
        for name, kernel in vars(importlib.import_module(module.name)).items():
            if getattr(kernel, "__module__", "") == module.name and hasattr(kernel, "signatures"):
                print(module.name, name, len(kernel.signatures))
"""


python = partial(run, sys.executable, "-c")


def test_a_kernel_that_is_compiled_is_announced_once_and_then_cached(tmp_path):
    assert python(ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path)) == "compiling\ndone\n"
    assert python(ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path)) == "done\n"


@pytest.mark.soak
@pytest.mark.parametrize("home_is_writable", [True, False])
def test_kernels_work_where_the_package_cannot_be_written(tmp_path, home_is_writable):
    package = tmp_path / "aqg"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(aqg.__file__).parent, package, ignore=ignored)
    for folder in [package, *package.rglob("*")]:
        if folder.is_dir():
            (folder / "__pycache__").write_text("no directory can be made here")
    home = tmp_path / "home"
    home.mkdir() if home_is_writable else home.write_text("no directory either")
    environment = {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(home), "NUMBA_CACHE_DIR": ""}
    assert python(ONE_KERNEL, **environment) == "compiling\ndone\n"
    again = "done\n" if home_is_writable else "compiling\ndone\n"
    assert python(ONE_KERNEL, **environment) == again


def test_a_run_compiles_no_kernel_twice():
    counts = {}
    for line in python(RUNS, cwd=ROOT).splitlines():
        module, name, count = line.split()
        counts[module, name] = int(count)
    assert counts["aqg.wire.context", "code_symbols"] == 1
    assert counts["aqg.core.grids", "_measure_rows"] == 1
    assert {key for key, count in counts.items() if count > 1} == set()


WITHOUT_NUMBA = """
import sys
if sys.argv[1] == "hidden":
    sys.modules["numba"] = None
import numpy as np
from aqg.core.recipes import make_recipe
from aqg.sim.engine import FastSimulation
from aqg.wire import context
from tests.problems import tiny_problem

for name in ("lean", "qsgd", "stc"):
    simulation = FastSimulation(tiny_problem(num_clients=2), make_recipe(name), 0.02)
    sizes = [simulation.run_round(evaluate=False).total_bytes for _ in range(3)]
    print(name, sizes, simulation.parameters.tobytes().hex())
for levels, bound in ((np.arange(0, 250, 7) % 15, 15), (np.arange(0, 65536, 997), 65536)):
    levels = levels.astype(np.uint8 if bound < 256 else np.uint16)
    payload = context.encode(levels, bound)
    assert (context.decode(payload, len(levels), bound) == levels).all()
    print(payload.hex())
"""


def test_kernels_do_the_same_as_plain_python():
    """Where numba is hidden, as the fuzzers do."""
    said = [python(WITHOUT_NUMBA, way, cwd=ROOT) for way in ("compiled", "hidden")]
    assert said[0] == said[1] != ""


SCRIPT = """
import pkgutil, importlib
from dataclasses import replace
import aqg.wire
from aqg.core.messages import Upload
from aqg.wire import decode, encode, warm_up
from tests.wire.golden.make import golden_messages
from tests.wire.hostile import good_frames, known_for

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
messages = list(golden_messages().values())
for data, length in good_frames():
    for kind in (bytes, bytearray, memoryview):
        message = decode(kind(data), length, known=known_for(length))
    messages.append(message)
for index, upload in enumerate([m for m in messages if isinstance(m, Upload)]):
    levels = upload.levels.copy()
    levels.flags.writeable = bool(index % 2)
    messages.append(replace(upload, levels=levels[::-1] if index % 3 else levels))
for message in messages:
    assert decode(encode(message), len(message) if hasattr(message, "__len__") else 0) == message
after = compiled()
assert after == before, {name: after[name] for name in after if after[name] != before[name]}
print("ok")
"""


@pytest.mark.soak
def test_warm_up_compiles_everything():
    assert run(sys.executable, "-W", "error", "-c", SCRIPT, cwd=ROOT) == "ok\n"
