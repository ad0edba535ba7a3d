"""Settings that cannot be are refused in one line that names them."""

import pytest

from aqg.core.downlink import make_downlink
from aqg.core.optimizers import Adam, Momentum, make_optimizer
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import make_step
from aqg.errors import ConfigError
from aqg.runs.config import resolve
from aqg.sim.training import Dropout, LocalTraining, Training


def configure(**settings):
    return resolve({"recipe": "auto", **settings})


SPECS = {
    make_recipe: {
        "nope": "unknown recipe 'nope'; choose from aqg, aqg-2",
        "lean:zeta=1": "no option 'zeta'; it has: xi, eta",
        "lean:eta=much": "'much'; it must be a number",
        "auto:noise=0": "noise is 0.0; it must be above 0 and finite",
        "auto:noise=inf": "noise is inf; it must be above 0 and finite",
        "auto:noise=nan": "noise is nan; it must be above 0 and finite",
        "auto:share=-0.1": "share is -0.1",
        "auto:share=nan": "share is nan",
        "stc:keep=0": "keep is 0.0; it must be above 0 and at most 1",
        "topk:keep=1.5": "keep is 1.5",
        "ef21-m:eta=0": "eta is 0.0; it must be above 0 and at most 1",
        "clag:zeta=-1": "zeta is -1.0; it must be at least 0",
        "clag:zeta=nan": "zeta is nan",
        "fedpaq:levels=2.5": "levels of recipe 'fedpaq' is '2.5'; it must be a whole number",
        "fedpaq:levels=40000": "levels is 40000; it must be in 1..32767",
        "eden:unbiased=2": "unbiased is 2; it must be 0 or 1",
        "eden:width=3": "width is 3.0; it must be one of 1, 2, 4, or in (0, 1)",
        "eden:width=0": "width is 0.0; it must be one of",
        "eden:width=nan": "width is nan; it must be one of",
        "aquila:beta=-1": "must be non-empty and not negative",
        "dadaquant:q=3": "q is 3; it must be a power of two in 1..16384",
        "dadaquant:q=1.5": "q of recipe 'dadaquant' is '1.5'; it must be a whole number",
        "dadaquant:phi=1": "phi is 1; it must be in 2..10000",
        "dadaquant:phi=nan": "phi of recipe 'dadaquant' is 'nan'; it must be a whole number",
        "dadaquant:psi=1": "psi is 1.0; it must be at least 0 and below 1",
        "fp16:keep=1": "has no option 'keep'",
        "qsgd:bucket=0.5": "bucket of recipe 'qsgd' is '0.5'; it must be a whole number",
    },
    make_step: {
        "long": "unknown step 'long'; choose from auto, fixed, dog",
        "dog:long=1": "step 'dog' has no option 'long'; it has: average, first, widest",
        "dog:widest=x": "option widest of step 'dog' is 'x'; it must be a number",
        "dog:widest=inf": "widest is inf; it must be above 0 and finite",
        "dog:first=0": "first is 0.0; it must be above 0 and finite",
        "fixed:first=1": "step 'fixed' has no option 'first'; it has: average",
        "fixed:average=-1": "average is -1.0; it must be at least 0 and finite",
    },
    make_downlink: {
        "half": "unknown downlink 'half'",
        "condensed:c=1": "has no option 'c'",
        "condensed:tolerance=-1": "tolerance is -1",
        "condensed:ratio=0": "ratio is 0",
        "condensed:bits=9": "bits is 9",
    },
    make_optimizer: {
        "lion": "unknown optimizer 'lion'; choose from sgd, momentum",
        "sgd:beta=1": "optimizer 'sgd' has no option 'beta'; it has: none",
        "adam:b1=x": "option b1 of optimizer 'adam' is 'x'; it must be a number",
    },
}
ARGUMENTS = [
    (make_recipe, {"spec": "lean", "max_staleness": 0}, "max_staleness is 0; it must be at least"),
    (make_recipe, {"spec": "laq", "bits": 0}, "bits is 0; it must be in 1..16"),
    (make_recipe, {"spec": "laq", "bits": 17}, "bits is 17"),
    (make_recipe, {"spec": "qsgd", "bits": 1}, "at least 2 bits"),
    *((Dropout, {"rate": r}, "at least 0 and below 1") for r in (-0.1, 1.0, 1.5, float("nan"))),
    *(
        (Dropout, {"absences": (absence,)}, "absence of client")
        for absence in ((-1, 1, 2), (0, 0, 2), (0, 3, 2))
    ),
    (LocalTraining, {"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    (LocalTraining, {"steps": 0}, "local_steps is 0; it must be at least 1"),
    (LocalTraining, {"epochs": -1}, "local_epochs is -1; it must be at least 1"),
    (LocalTraining, {"steps": 2, "epochs": 2}, "local_steps is 2 and local_epochs 2; give one"),
    (LocalTraining, {"rate": 0.0}, "local_rate is 0.0; it must be above 0"),
    (Training, {"weighting": "size"}, "unknown weighting 'size'; choose from equal, samples"),
    (Training, {"participation": 1.5}, "participation is 1.5; it must be above 0 and at"),
    (Momentum, {"beta": 1.0}, "beta is 1.0; it must be at least 0 and below 1"),
    (Adam, {"b2": -0.1}, "b2 is -0.1; it must be at least 0 and below 1"),
    (Adam, {"eps": 0.0}, "eps is 0.0; it must be above 0"),
    (configure, {"colour": 1}, "unknown setting 'colour'; choose from recipe, bits"),
    (
        configure,
        {"dataset": "cifar"},
        "unknown dataset 'cifar'; choose from digits, mnist, heterogeneous",
    ),
    (configure, {"recipe": "lean,lean"}, "named twice"),
    (configure, {"rounds": 2.5}, "rounds is 2.5; it must be a whole number"),
    (configure, {"alpha": float("nan")}, "alpha is nan"),
    (configure, {"alpha": "fast"}, "alpha is 'fast'; it must be a number"),
    (configure, {"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and below 1"),
    (configure, {"bits": 17}, "bits is 17; it must be in 1..16"),
    (configure, {"scaling": "max"}, "unknown scaling 'max'; choose from mean, sum"),
    (configure, {"dtype": "float16"}, "unknown dtype 'float16'"),
    (configure, {"engine": "warp"}, "unknown engine 'warp'; choose from fast, reference"),
    (configure, {"engine": "reference", "device": "cuda"}, "reference engine runs on cpu only"),
    (configure, {"partition": "rings"}, "rings"),
    (configure, {"partition": "dirichlet:-1"}, "-1"),
    (configure, {"absences": [[1, 2]]}, "it must be a list of [client, first round, last round]"),
    (configure, {"absences": [[10, 1, 2]]}, "absent client is 10; it must be below 10"),
    (configure, {"plugins": ["/nowhere/x.py"]}, "'/nowhere/x.py' cannot be read"),
    (configure, {"recipe": 3}, "recipe is 3; it must be a text or a list of texts"),
    (configure, {"recipe": ["lean", 3]}, "it must be a text or a list of texts"),
    (configure, {"recipe": ","}, "unknown recipe ''"),
    (configure, {"problem": 3}, "problem is 3; it must be a text"),
    (configure, {"hold": 3}, "hold is 3; it must be 0 without a target"),
    (
        configure,
        {"target": 1.5, "target_kind": "accuracy"},
        "target accuracy is 1.5; it must be above 0",
    ),
    (
        configure,
        {"target": 1.5, "target_kind": "beauty"},
        "unknown target_kind 'beauty'; choose from",
    ),
    (configure, {"target": 0.1, "hold": 20, "eval_every": 2}, "must be measured in every round"),
    (configure, {"target": 0.1, "hold": 20, "rounds": 20}, "there must be more than 20"),
    (configure, {"validation": 0.2}, "with target_kind residual"),
    (configure, {"reset": 1}, "reset is 1; it must be true or false"),
    (configure, {"optimizer": 3}, "optimizer is 3; it must be a text"),
    (configure, {"optimizer": "adam:b1=2"}, "b1 is 2.0; it must be at least 0"),
    (configure, {"scaling": "sum", "batch_size": 5}, "batch_size is 5 with scaling sum"),
    (configure, {"scaling": "sum", "weighting": "samples"}, "with scaling sum"),
    (configure, {"buffer_size": 3}, "buffer_size is 3 without speeds"),
    (configure, {"link_mbit": 2.0}, "link_mbit is 2.0 without speeds"),
    (
        configure,
        {"speeds": "equal", "buffer_size": 11, "local_steps": 2},
        "buffer_size is 11; it must be in 1..10",
    ),
    (configure, {"speeds": "equal", "buffer_size": 3}, "mirror of every client"),
    (configure, {"speeds": "equal", "buffer_size": 3, "recipe": "laq"}, "mirror of every client"),
    (configure, {"speeds": "walk"}, "unknown speeds 'walk'; choose from equal, lognormal, strag"),
    (configure, {"speeds": "lognormal:sigma=-1"}, "sigma is -1; it must be at least 0"),
    (configure, {"speeds": "equal:seconds=0"}, "seconds is 0; it must be above 0"),
    (configure, {"speeds": "stragglers:share=2"}, "share is 2; it must be at least 0 and at most"),
    (configure, {"speeds": "equal", "outages": "random:chance=nan"}, "chance is nan"),
]


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [(m, *case) for m, cases in SPECS.items() for case in cases.items()] + ARGUMENTS,
)
def test_bad_settings_are_named(make, given, message):
    with pytest.raises(ConfigError) as caught:
        make(given) if isinstance(given, str) else make(**given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
