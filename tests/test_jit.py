"""What is compiled, when, and where it is kept."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import aqg

pytest.importorskip("numba")

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
import numpy as np
import aqg
from aqg.core.recipes import make_recipe
from aqg.objectives import make_objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples

random = np.random.default_rng(0)
objective = make_objective("softmax", 60, 5, l2=0.01, scaling="mean")
clients = tuple(
    Samples(random.standard_normal((20, 60)), random.integers(0, 5, 20)) for _ in range(3)
)
problem = Problem(objective, clients, np.zeros(objective.num_params))
for name in ("auto", "gd", "laq"):
    for _ in FastSimulation(problem, make_recipe(name), step_size=0.1).run_rounds(15):
        pass

for module in pkgutil.walk_packages(aqg.__path__, "aqg."):
    if module.name.startswith(("aqg.wire.", "aqg.core.")):
        for name, kernel in vars(importlib.import_module(module.name)).items():
            if getattr(kernel, "__module__", "") == module.name and hasattr(kernel, "signatures"):
                print(module.name, name, len(kernel.signatures))
"""


def run(script, **environment):
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kernel_that_is_compiled_is_announced_once_and_then_cached(tmp_path):
    assert run(ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path)) == "compiling\ndone\n"
    assert run(ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path)) == "done\n"


@pytest.mark.soak
@pytest.mark.parametrize("home_is_writable", [True, False])
def test_kernels_work_where_the_package_cannot_be_written(tmp_path, home_is_writable):
    package = tmp_path / "aqg"
    shutil.copytree(
        Path(aqg.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder in [package, *package.rglob("*")]:
        if folder.is_dir():
            (folder / "__pycache__").write_text("no directory can be made here")
    home = tmp_path / "home"
    home.mkdir() if home_is_writable else home.write_text("no directory either")
    environment = {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(home), "NUMBA_CACHE_DIR": ""}
    assert run(ONE_KERNEL, **environment) == "compiling\ndone\n"
    again = "done\n" if home_is_writable else "compiling\ndone\n"
    assert run(ONE_KERNEL, **environment) == again


def test_a_run_compiles_no_kernel_twice():
    counts = {}
    for line in run(RUNS).splitlines():
        module, name, count = line.split()
        counts[module, name] = int(count)
    assert counts["aqg.wire.context", "code_symbols"] == 1
    assert counts["aqg.core.kernels", "_measure_rows"] == 1
    assert {key for key, count in counts.items() if count > 1} == set()


WITHOUT_NUMBA = """
import sys
if sys.argv[1] == "hidden":
    sys.modules["numba"] = None
from aqg.core.recipes import make_recipe
from aqg.sim.engine import FastSimulation
from tests.problems import tiny_problem

for name in ("lean", "qsgd", "stc"):
    simulation = FastSimulation(tiny_problem(num_clients=2), make_recipe(name), 0.02)
    sizes = [simulation.run_round(evaluate=False).total_bytes for _ in range(3)]
    print(name, sizes, simulation.parameters.tobytes().hex())
"""


def test_kernels_do_the_same_as_plain_python():
    """Where numba is hidden, as the fuzzers do."""
    command = (sys.executable, "-c", WITHOUT_NUMBA)
    root = Path(__file__).parents[1]
    said = [
        subprocess.run([*command, way], cwd=root, check=True, capture_output=True).stdout
        for way in ("compiled", "hidden")
    ]
    assert said[0] == said[1] != b""
