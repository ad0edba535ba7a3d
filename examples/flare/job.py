"""Federated averaging with NVIDIA FLARE, in its simulator; one line compresses it.

With ``--poc`` it runs in FLARE's proof-of-concept mode, in which the server and every site are
services of their own on this machine. NVFLARE_POC_WORKSPACE says where their files go.
"""

import argparse
import sys
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import PocEnv, SimEnv

from aqg.flare import compress

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from net import Net  # noqa: E402  (FLARE reads the module's source where it lies)


def main() -> None:
    """Run the job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workspace", default="/tmp/nvflare/simulation")
    parser.add_argument("--poc", action="store_true", help="run it on services of their own")
    arguments = parser.parse_args()
    recipe = FedAvgRecipe(
        name="digits",
        model=Net(),
        min_clients=arguments.sites,
        num_rounds=arguments.rounds,
        train_script=str(HERE / "client.py"),
        train_args=f"--sites {arguments.sites}",
    )
    compress(recipe)
    sites = {"num_clients": arguments.sites}
    if arguments.poc:
        environment = PocEnv(**sites)
    else:
        environment = SimEnv(**sites, workspace_root=arguments.workspace)
    run = recipe.execute(environment)
    print("The model, and the log of every site:", run.get_result(clean_up=False))


if __name__ == "__main__":
    main()
