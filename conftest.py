"""What the doctests of ``src`` cannot import everywhere."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = []
if (
    find_spec("triton") is None
):  # kernels for GPUs; torch brings Triton along where it supports them
    collect_ignore += ["src/aqg/objectives/triton_kernels.py", "src/aqg/sim/triton_statistics.py"]
