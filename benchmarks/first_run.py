"""How long the first ``aqg run`` after an install takes, and the second.

    python benchmarks/first_run.py

Both take what numba and matplotlib keep between runs from a fresh directory, so that the first
compiles every kernel it needs and finds the fonts. Prints the seconds of both, and those on the
processor, which say more on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arguments", nargs="*", help="of aqg run, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        caches = {"NUMBA_CACHE_DIR": f"{folder}/numba", "MPLCONFIGDIR": f"{folder}/matplotlib"}
        before = 0.0
        for name in ("first", "second"):
            out = Path(folder, name)
            command = [sys.executable, "-m", "aqg", "run", "--out", str(out), *options.arguments]
            start = time.perf_counter()
            done = subprocess.run(
                command, env=os.environ | caches, capture_output=True, text=True, check=True
            )
            seconds = time.perf_counter() - start
            said = " ".join(done.stderr.split())
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            computed = usage.ru_utime + usage.ru_stime - before
            before += computed
            print(f"{name} run: {seconds:.1f} s, {computed:.1f} s of them on the processor")
            if said:
                print(f"  says: {said}")
        kernels = sum(1 for _ in Path(folder, "numba").rglob("*.nbc"))
        print(f"kernels compiled: {kernels}")


if __name__ == "__main__":
    main()
