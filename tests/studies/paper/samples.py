"""Outcomes made by hand, for tables and verdicts."""

from aqg.runs.cost import Cost
from aqg.runs.stopping import Trace
from aqg.studies.paper.outcomes import Outcome, Results
from aqg.studies.paper.plan import FULL

START = Cost(0, 0, 0, 0)


def make_outcome(**changes):
    settings = {
        "section": "softmax",
        "recipe": "laq",
        "partition": "label",
        "scaling": "mean",
        "alpha": 0.02,
        "dropout": 0.0,
        "seed": 0,
        "machine": "aarch64",
        "device": "cpu",
        "minimum": 0.5,
        "start_loss": 2.5,
        "final_loss": 0.6,
        "peak_loss": 14.0,
        "test_accuracy": 0.9,
        "total": Cost(4000, 900, 3600, 500_000),
        "reached": {0.1: Cost(100, 90, 360, 50_000)},
    }
    settings |= changes
    name = "_".join(str(settings[key]) for key in ("section", "partition", "alpha", "dropout"))
    settings.setdefault("name", f"{name}_{settings['recipe']}_seed{settings['seed']}")
    return Outcome(**settings)


def make_results(outcomes, **about):
    curves = {o.name: Trace((START, o.total), (o.start_loss, o.final_loss), ()) for o in outcomes}
    return Results(tuple(outcomes), curves, FULL | {"notes": ()} | about)


def logistic_run(recipe, seed, bits, converged=True, alpha=0.002, **changes):
    uploads = bits // 2 if recipe == "aqg-2" else bits // 4
    return make_outcome(
        **{
            "section": "logistic",
            "partition": "iid",
            "recipe": recipe,
            "seed": seed,
            "scaling": "sum",
            "alpha": alpha,
            "minimum": 70.0,
            "start_loss": 89.0,
            "final_loss": 70.0 + (1e-9 if converged else 2.0),
            "total": Cost(500, uploads, bits, 10 * bits),
            "reached": {},
            **changes,
        }
    )


def dropout_run(recipe, seed, bits=None, rate=0.9, partition="iid", away=False):
    """Make a run that arrives at 1e-3 with these bits, or does not arrive, or runs away."""
    return make_outcome(
        section="dropouts",
        partition=partition,
        recipe=recipe,
        seed=seed,
        dropout=rate,
        final_loss=9.0 if away else 0.5 + (1e-9 if bits else 0.01),
        reached={} if bits is None else {1e-3: Cost(1000, bits // 2, bits, 50 * bits)},
    )
