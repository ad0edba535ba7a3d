"""NVIDIA FLARE's example job, plain, with FLARE's own quantization and with aqg: bytes, accuracy.

python benchmarks/flare.py                     # all that run here, into results/flare.jsonl,
                                               # in place of rows of the same variants
python benchmarks/flare.py --only aqg --rounds 5 --out /tmp/flare.jsonl

It needs an environment with nvflare: ``pip install 'aqg[flare]' scikit-learn``. Every variant is a
run of FLARE's simulator, a process for the server and one for each site. Bytes are all frames on
the server's connections, from the start of the job to its end: models, requests and polling.
FLARE's own quantization needs bitsandbytes, and is left out without it. Its 8-bit and 4-bit
filters ask for a GPU; where there is none they quantize on the CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

HERE = Path(__file__).parent
ROOT = HERE.parent
EXAMPLE = ROOT / "examples" / "flare"
VARIANTS = {
    "plain": None,
    "float16": "float16",
    "blockwise8": "blockwise8",
    "normfloat4": "normfloat4",
    "adaquant": "adaquant",
    "aqg": None,
}
"""The names of FLARE's quantization, where the variant has it."""
LAST = 5
"""Over so many last rounds the accuracy is a mean."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=VARIANTS, action="append")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--recipe", default="auto")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "flare.jsonl")
    parser.add_argument("--run", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--workspace", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments)
        return
    rows = []
    for name in arguments.only or VARIANTS:
        missing = why_not(name)
        if missing:
            print(f"{name}: not run: {missing}")
            continue
        rows.append(measure(name, arguments))
        print(json.dumps(rows[-1]), flush=True)
    stored = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    by_variant = {row["variant"]: row for row in (*map(json.loads, stored), *rows)}
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in by_variant.values()))
    print_table(rows)


def why_not(name: str) -> str:
    """Say what a variant lacks here; empty where nothing is."""
    if VARIANTS[name] is None:
        return ""
    if find_spec("bitsandbytes") is None:
        return "FLARE's quantization imports bitsandbytes, which is not installed"
    return ""


def measure(name: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Run a variant in processes of its own; return bytes of a site and round, and the accuracy."""
    with tempfile.TemporaryDirectory() as workspace:
        options = ["--run", name, "--workspace", workspace, "--recipe", arguments.recipe]
        options += ["--rounds", str(arguments.rounds), "--sites", str(arguments.sites)]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, __file__, *options], capture_output=True, text=True, check=False
        )
        file = Path(workspace) / "meter.json"
        if done.returncode or not file.exists():
            raise SystemExit(f"{name} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        found = json.loads(file.read_text())
    rounds, exchanges = found["rounds"], arguments.rounds * arguments.sites
    if len(rounds) != arguments.rounds:
        raise SystemExit(f"{name}: {len(rounds)} of {arguments.rounds} rounds:\n{done.stdout}")
    late = {way: rounds[-1][way] - rounds[0][way] for way in ("up", "down")}
    return {
        "variant": name if name != "aqg" else f"aqg, {arguments.recipe}",
        "rounds": arguments.rounds,
        "sites": arguments.sites,
        "up_bytes": round(found["up"] / exchanges),
        "down_bytes": round(found["down"] / exchanges),
        "later_up_bytes": round(late["up"] / (exchanges - arguments.sites)),
        "later_down_bytes": round(late["down"] / (exchanges - arguments.sites)),
        "accuracy": mean(row["accuracy"] for row in rounds[-LAST:]),
        "accuracies": [round(row["accuracy"], 4) for row in rounds],
        "seconds": round(time.monotonic() - started),
    }


def run(arguments: argparse.Namespace) -> None:
    """Run a variant in FLARE's simulator."""
    sys.path.insert(0, str(EXAMPLE))
    import torch
    from flare_meter import Meter, WithoutGpu
    from net import Net
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    recipe = FedAvgRecipe(
        name="digits",
        model=Net(),
        min_clients=arguments.sites,
        num_rounds=arguments.rounds,
        train_script=str(EXAMPLE / "client.py"),
        train_args=f"--sites {arguments.sites}",
    )
    recipe._job.to_server(Meter(f"{arguments.workspace}/meter.json"), id="meter")
    kind = VARIANTS[arguments.run]
    if kind:
        from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer
        from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer

        recipe.add_server_output_filter(ModelQuantizer(kind), ["train"])
        recipe.add_server_input_filter(ModelDequantizer(), ["train"])
        recipe.add_client_output_filter(ModelQuantizer(kind), ["train"])
        recipe.add_client_input_filter(ModelDequantizer(), ["train"])
        if not torch.cuda.is_available():
            recipe._job.to_server(WithoutGpu(), id="without_gpu")
            recipe._job.to_clients(WithoutGpu(), id="without_gpu")
    if arguments.run == "aqg":
        from aqg.flare import compress

        compress(recipe, recipe=arguments.recipe)
    recipe.execute(SimEnv(num_clients=arguments.sites, workspace_root=arguments.workspace))


def print_table(rows: list[dict[str, object]]) -> None:
    print("\n| variant | accuracy | up | down | up, after round 1 | down, after round 1 |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        sizes = (
            f"{row[f'{when}{way}_bytes'] / 1000:,.1f} kB"
            for when in ("", "later_")
            for way in ("up", "down")
        )
        print(f"| {row['variant']} | {100 * row['accuracy']:.2f} % | {' | '.join(sizes)} |")


if __name__ == "__main__":
    main()
