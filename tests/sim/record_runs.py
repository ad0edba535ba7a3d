"""What every recipe did when it was last changed on purpose: widths, bytes and models, per round.

``python -m tests.sim.record_runs NAME/SETTING…`` writes the cases that begin so anew, and all of
them without one; `test_record` holds the code to it. The problem is made of single additions and
multiplications, so that no library's sums are in it.
"""

import gzip
import hashlib
import json
import platform
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from aqg.core.optimizers import make_optimizer
from aqg.core.recipes import RECIPES, make_recipe
from aqg.objectives.base import Objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.training import Dropout, LocalTraining, Training

FILE = Path(__file__).parent / "data" / "record.json.gz"
NUM_PARAMS, NUM_CLIENTS, NUM_SAMPLES, ROUNDS = 1100, 5, 6, 16
SETTINGS = {
    "exact": (Training(), None),
    "local": (Training(local=LocalTraining(batch_size=2, steps=3)), None),
    "sampled": (Training(local=LocalTraining(batch_size=3), participation=0.3), None),
    "dropouts": (Training(weighting="samples"), Dropout(0.5, seed=2)),
}
OPTIMIZERS = ("sgd", "momentum", "adam")
STEPS = {"sgd": 0.1, "momentum": 0.03, "adam": 0.01}


class Quadratic(Objective):
    """``f_m(θ) = mean_i ½ Σ_j h_j (θ_j - x_ij)²``, summed one number after the other."""

    stackable = False

    def __init__(self, num_params):
        super().__init__("quadratic", (("theta", (num_params,)),), l2=0.0, convex=True)
        self.curvature = 0.25 + np.arange(num_params) % 7 / 4.0

    def init_params(self, seed):
        return np.zeros(self.num_params)

    def losses(self, params, features, labels):
        return self.losses_and_gradients(params, features, labels)[0]

    def losses_and_gradients(self, params, features, labels):
        curvature = self.curvature.astype(params.dtype)
        gradient, loss = np.zeros_like(params), 0.0
        for row in features:
            slope = curvature * (params - row)
            gradient = gradient + slope / params.dtype.type(len(features))
            loss += float(np.add.accumulate((slope * (params - row)).astype(np.float64))[-1])
        return np.asarray(loss / (2 * len(features))), gradient

    def predict(self, params, features):
        return np.zeros(features.shape[:-1], np.int64)


def problem(dtype):
    rng = np.random.default_rng(23)
    center = rng.integers(-64, 65, NUM_PARAMS) / 32.0
    clients = []
    for client in range(NUM_CLIENTS):
        own = center + rng.integers(-16, 17, NUM_PARAMS) / 32.0
        size = NUM_SAMPLES + client
        rows = own + rng.integers(-32, 33, (size, NUM_PARAMS)) / 64.0
        clients.append(Samples(rows.astype(dtype), np.zeros(size, np.int64)))
    return Problem(Quadratic(NUM_PARAMS), tuple(clients), np.zeros(NUM_PARAMS, dtype))


def simulate(case, engine=FastSimulation):
    """Make the simulation that a case names: recipe, setting, optimizer and precision."""
    name, setting, optimizer, dtype = case.split("/")
    training, dropout = SETTINGS[setting]
    training = replace(training, optimizer=make_optimizer(optimizer))
    recipe = make_recipe(name, max_staleness=6)
    return engine(problem(dtype), recipe, STEPS[optimizer], dropout, 7, training=training)


def cases():
    names = sorted(RECIPES)
    return ["/".join(c) for c in product(names, SETTINGS, OPTIMIZERS, ("float64", "float32"))]


def play(simulation, rounds=ROUNDS):
    """Run it and return what the record keeps: widths, bytes, and a digest of every model."""
    widths, sizes, digests = [], [], []
    for _ in range(rounds):
        record = simulation.run_round(evaluate=False)
        widths.append(" ".join(map(str, record.widths)))
        sizes.append(record.upload_bytes)
        model = hashlib.blake2b(simulation.parameters.tobytes(), digest_size=3)
        digests.append(model.hexdigest())
    return {"widths": widths, "bytes": sizes, "models": digests}


def main(prefixes):
    record = json.loads(gzip.decompress(FILE.read_bytes())) if prefixes else {"runs": {}}
    for case in cases():
        if not prefixes or case.startswith(tuple(prefixes)):
            record["runs"][case] = play(simulate(case)) | {"machine": platform.machine()}
            print(case, sum(record["runs"][case]["bytes"]), file=sys.stderr)
    FILE.parent.mkdir(exist_ok=True)
    text = json.dumps(record, separators=(",", ":")).encode()
    FILE.write_bytes(gzip.compress(text, 9, mtime=0))


if __name__ == "__main__":
    main(sys.argv[1:])
