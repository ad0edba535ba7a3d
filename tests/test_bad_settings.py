"""Settings that cannot be are refused in one line that names them."""

import json
from dataclasses import MISSING, fields

import numpy as np
import pytest
from torch import complex64, nn, zeros

from aqg.core.downlink import make_downlink
from aqg.core.optimizers import Adam, Momentum, make_optimizer
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import make_step
from aqg.data.datasets import Dataset
from aqg.data.partitions import parse_partition
from aqg.errors import ConfigError, DataError
from aqg.models import DataShape, make_module
from aqg.objectives import Objective, make_objective
from aqg.objectives.layout import ModelLayout
from aqg.objectives.metrics import make_metrics
from aqg.protocol import ServerSession
from aqg.runs.config import parse_assignment, resolve
from aqg.settings import Bound, FlowerSettings, RunSettings, table, typed, types
from aqg.sim.engine import FastSimulation
from aqg.sim.training import Dropout, LocalTraining, Training
from aqg.spec import make_named
from aqg.studies.contest.search import parse_recipes
from aqg.studies.contest.tasks import parse_tasks
from aqg.studies.paper.plan import parse_sections
from aqg.studies.sweep import expand

from tests.commands import refuse
from tests.problems import tiny_problem


def configure(**settings):
    return resolve({"recipe": "auto", **settings})


def objective(spec="softmax", num_features=4, num_classes=3, l2=0.0, scaling="mean", seed=0):
    return make_objective(spec, num_features, num_classes, l2, scaling).init_params(seed)


def session(**options):
    usual = {"parameters": np.zeros(6), "num_clients": 3, "recipe": "lean"}
    return ServerSession(**usual | options)


def keeping(recipe, memory):
    training = Training(LocalTraining(batch_size=8), memory=memory)
    return FastSimulation(tiny_problem(), make_recipe(recipe), 0.1, training=training)


def dataset(**changes):
    made = {"features": np.zeros((3, 2)), "labels": np.array([0, 1, 1]), "num_classes": 2}
    return Dataset(name="set", **made | changes)


def of_what_was_computed():
    linear = nn.Linear(6, 3)
    linear.result = linear.weight * 2  # torch cannot copy it
    return linear


def of_complex_numbers():
    module = nn.Linear(2, 1)
    module.phase = nn.Parameter(zeros(2, dtype=complex64))
    return module


def of_twins():
    twins = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    twins[1].weight = nn.Parameter(twins[0].weight.data)
    return twins


def grid(**document):
    return expand(document)


def scale(number: int, *, factor: float = 1.0, loud: bool = False):
    return number, factor, loud


def scaled(spec):
    return make_named("rule", spec, {"scale": scale}, also=("auto",))


def images(*shape, num_classes=10, target_shape=()):
    return DataShape(shape, target_shape, num_classes, 0)


TOKENS = DataShape((4,), (4,), 0, 9)
LINEAR = nn.Linear(6, 3)
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
        "qsgd:bucket=0.5": "bucket of recipe 'qsgd' is '0.5'; it must be a whole number",
    },
    objective: {
        "": "unknown model ''; choose from cnn, resnet8",
        "mlp": "model 'mlp' needs a value, as in mlp:HIDDEN",
        "mlp:0": "option hidden of model 'mlp' is 0; it must be at least 1",
        "mlp:2.5": "option hidden of model 'mlp' is '2.5'; it must be a whole number",
        "softmax:3": "model 'softmax' has no option '3'; it has: none",
    },
    parse_partition: {
        "IID": "unknown partition 'IID'; choose from iid, label, source, natural, dirichlet",
        "iid:1": "partition 'iid' has no option '1'; it has: none",
        "source:mixed": "partition 'source' has no option 'mixed'; it has: shuffled",
        "shards:0": "the number in shards:K is 0; it must be at least 1",
        "shards:1.5": "of partition 'shards' is '1.5'; it must be a whole number",
        **{f"dirichlet:{x}": "must be above 0 and at most 1e+09" for x in ("0", "nan", "1e10")},
    },
    parse_recipes: {"lean,zip": "unknown recipe 'zip'", "lean,gd,lean": "'lean' is named twice"},
    parse_tasks: {"mnist": "unknown task 'mnist'; choose from all, averaging, dig"},
    parse_sections: {"figures": "unknown part 'figures'"},
    parse_assignment: dict.fromkeys(("alpha", "=3", ""), "is not of the form key=value"),
    make_metrics: {
        "acuracy": "'acuracy' is not one of accuracy, mse, r2, perplexity",
        "accuracy,accuracy": "named twice",
    },
    scaled: {
        "grow": "unknown rule 'grow'; choose from auto, scale",
        "scale": "rule 'scale' needs a value, as in scale:NUMBER",
        "scale:2.5": "option number of rule 'scale' is '2.5'; it must be a whole number",
        "scale:1:factor=x": "option factor of rule 'scale' is 'x'; it must be a number",
        "scale:1:loud=2": "option loud of rule 'scale' is '2'; it must be true or false",
        "scale:1:2": "rule 'scale' has no option '2'; it has: number, factor, loud",
        "scale:1:factor=1:factor=2": "option factor of rule 'scale' is given twice",
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
GIVEN = {
    make_recipe: [
        ({"spec": "lean", "max_staleness": 0}, "max_staleness is 0; it must be at least"),
        ({"spec": "laq", "bits": 0}, "bits is 0; it must be in 1..16"),
        ({"spec": "laq", "bits": 17}, "bits is 17"),
        ({"spec": "qsgd", "bits": 1}, "at least 2 bits"),
    ],
    Dropout: [
        *(({"rate": r}, "at least 0 and below 1") for r in (-0.1, 1.0, 1.5, float("nan"))),
        *(
            ({"absences": (absence,)}, "absence of client")
            for absence in ((-1, 1, 2), (0, 0, 2), (0, 3, 2))
        ),
    ],
    LocalTraining: [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"steps": 0}, "local_steps is 0; it must be at least 1"),
        ({"epochs": -1}, "local_epochs is -1; it must be at least 1"),
        ({"steps": 2, "epochs": 2}, "local_steps is 2 and local_epochs 2; give one"),
        ({"rate": 0.0}, "local_rate is 0.0; it must be above 0"),
    ],
    Training: [
        ({"weighting": "size"}, "unknown weighting 'size'; choose from equal, samples"),
        ({"participation": 1.5}, "participation is 1.5; it must be above 0 and at"),
    ],
    Momentum: [({"beta": 1.0}, "beta is 1.0; it must be at least 0 and below 1")],
    Adam: [
        ({"b2": -0.1}, "b2 is -0.1; it must be at least 0 and below 1"),
        ({"eps": 0.0}, "eps is 0.0; it must be above 0"),
    ],
    objective: [
        (("logistic",), "needs 2 classes, the data has 3"),
        ({"num_features": 0}, "features is 0; it must be at least 1"),
        ({"num_classes": 1}, "classes is 1; it must be at least 2"),
        ({"l2": -0.5}, "l2 is -0.5"),
        ({"l2": float("nan")}, "l2 is nan"),
        ({"scaling": "median"}, "unknown scaling 'median'; choose from mean, sum"),
        ({"seed": -1}, "seed is -1"),
    ],
    make_metrics: [
        (([3],), "metric is a int"),
        (({"my metric": max},), "letters, digits and underscores"),
        (({"loss": max},), "other than loss and residual"),
        ((lambda o, t: 0.0,), "without a name"),
    ],
    Objective.from_module: [
        (("cnn",), "module is a str, not a torch.nn.Module"),
        ((nn.ReLU(),), "ReLU has 0 parameters that require a gradient"),
        ((of_what_was_computed(),), "Linear cannot be copied"),
        ({"module": LINEAR, "l2": -1}, "l2 is -1; it must be finite and at least 0"),
        ({"module": LINEAR, "scaling": "max"}, "unknown scaling 'max'; choose from mean, sum"),
        ({"module": LINEAR, "input_shape": ()}, "is not a tuple of integers above 0"),
        ({"module": LINEAR, "input_shape": (1, 0)}, "is not a tuple of integers above 0"),
        (
            {"module": nn.TransformerEncoderLayer(6, 2, 4, dropout=0.0), "reset": True},
            "self_attn (MultiheadAttention) has none",
        ),
    ],
    ModelLayout.of: [
        ((of_complex_numbers(),), "parameter 'phase' is complex64"),
        ((of_twins(),), "'0.weight' and '1.weight' share their memory"),
        ((nn.LazyLinear(3),), "'weight' has no values yet"),
        (
            {"module": LINEAR, "statistics": "mean"},
            "unknown statistics 'mean'; choose from average",
        ),
    ],
    make_module: [
        (("cnn", images(63), 0), "samples of shape (63,) are no images"),
        (("resnet8", images(9, 9, 9), 0), "samples of shape (9, 9, 9) are no images"),
        (("cnn:width=0", images(8, 8), 0), "width of model 'cnn' is 0"),
        (("cnn", images(8, 8, num_classes=0, target_shape=(2, 2)), 0), "too much for model 'cnn'"),
        (("transformer", images(8), 0), "are no sequences"),
        (("transformer:heads=3", TOKENS, 0), "not a multiple of its 3 heads"),
        (("transformer:dropout=1", TOKENS, 0), "dropout of model"),
    ],
    dataset: [
        ({"features": np.zeros(3)}, "shape (3,)"),
        ({"labels": np.array([0, 1])}, "labels of shape (2,)"),
        ({"features": np.zeros((0, 2)), "labels": np.zeros(0, int)}, "N >= 1"),
        ({"num_classes": 1}, "labels in 0..1, outside 0..0"),
        ({"labels": np.array([-1, 0, 0])}, "labels in -1..0"),
        ({"test_features": np.zeros((3, 2))}, "not both"),
        (
            {"test_features": np.zeros((3, 5)), "test_labels": np.array([0, 1, 1])},
            "shape (3, 2), and of shape (3, 5)",
        ),
        ({"test_features": np.zeros((3, 2)), "test_labels": np.array([1, 2, 2])}, "'set (test)'"),
        ({"sources": np.array([0, 1])}, "sources of shape (2,)"),
    ],
    session: [
        ({"downlink": "full"}, "'exact', 'condensed'"),
        ({"recipe": "zip"}, "unknown recipe"),
        ({"weights": [1.0, 2.0]}, "3 finite numbers"),
        ({"weights": "abc"}, "3 finite numbers"),
        ({"weights": [None, 1, 2]}, "3 finite numbers"),
        ({"weights": [1, 2, np.nan]}, "3 finite numbers"),
        ({"step_size": np.nan}, "step_size is nan"),
        ({"step_size": "0.1"}, "step_size is '0.1'"),
        ({"sampled": 0}, "sampled is 0"),
        ({"sampled": 1.5}, "sampled is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"start": "post"}, "start is 'post'; choose from seed"),
        ({"layout": (("weight", (4,)),)}, "shape (6,); the tensors need (4,)"),
        ({"memory": "none"}, "memory is 'none' with a recipe whose clients remember"),
        ({"parameters": np.array([0.0, np.nan, np.inf])}, "2 values that are not finite"),
        ({"parameters": np.zeros((2, 2))}, "float64(2, 2)"),
        ({"parameters": np.zeros(0)}, "float64(0,)"),
        ({"parameters": np.zeros(3, np.int64)}, "int64"),
        ({"parameters": "abc"}, "flat, float32 or float64"),
        ({"parameters": None}, "flat, float32 or float64"),
    ],
    keeping: [
        (("lean", "none"), "memory is 'none' with a recipe whose clients"),
        (("stc", "none"), "memory is 'none' with a recipe whose clients"),
        (("qsgd", "all"), "memory is 'all'; choose from model, none"),
    ],
    grid: [
        ({"grid": 3}, "no table [grid]"),
        ({"grid": {}}, "no table [grid]"),
        ({"seed": 1}, "no table [grid]"),
        ({"nope": 1, "grid": {"seed": [0]}}, "unknown setting 'nope'; choose from recipe"),
        ({"grid": {"nope": [0]}}, "unknown setting 'nope'; choose from recipe"),
        ({"grid": {"seed": 3}}, "seed in [grid] is 3; it must be a list"),
        ({"grid": {"seed": []}}, "seed in [grid] is []; it must have at least 1 value"),
        ({"grid": {"seed": [1, 2, 1]}}, "seed in [grid] has 1 twice"),
        ({"grid": {"dropout": [0, 0.0]}}, "dropout in [grid] has 0.0 twice"),
        ({"seed": 1, "grid": {"seed": [1, 2]}}, "seed is both fixed (1) and in [grid]"),
        ({"grid": {"recipe": ["gd", " gd"]}}, "are the same run, recipe-gd"),
        ({"recipe": "gd,laq", "grid": {"seed": [1]}}, "a run has 1 recipe, not 2"),
        ({"grid": {"seed": [1]}}, "a run has 1 recipe, not 3"),
        ({"recipe": "gd", "grid": {"rounds": [5, -5]}}, "rounds is -5; it must be at least 1"),
        ({"recipe": "gd", "grid": {"seed": [True]}}, "seed is True; it must be a whole number"),
        ({"grid": {"recipe": ["gd", "nope"]}}, "unknown recipe 'nope'"),
        ({"run": 3}, "run is not an array of tables"),
        ({"run": [{"recipe": "gd"}], "grid": {"seed": [1]}}, "both [grid] and [[run]]"),
        ({"run": [{"recipe": "gd", "sead": 1}]}, "unknown setting 'sead'"),
        ({"run": [{"recipe": "gd"}, {"recipe": "gd"}]}, "are the same run"),
        ({"run": [{"recipe": "gd", "name": "a"}, {"recipe": "lean"}]}, "every run needs one"),
        ({"run": [{"recipe": "gd", "name": "../a"}]}, "name of a run is '../a'"),
        ({"run": [{"recipe": r, "name": "a"} for r in ("gd", "laq")]}, "runs have the name"),
    ],
    configure: [
        ({"colour": 1}, "unknown setting 'colour'; choose from recipe, bits"),
        ({"dataset": "cifar"}, "unknown dataset 'cifar'; choose from digits, mnist, heterogeneous"),
        ({"recipe": "lean,lean"}, "named twice"),
        ({"rounds": 2.5}, "rounds is 2.5; it must be a whole number"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"alpha": "fast"}, "alpha is 'fast'; it must be a number"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and below 1"),
        ({"bits": 17}, "bits is 17; it must be in 1..16"),
        ({"scaling": "max"}, "unknown scaling 'max'; choose from mean, sum"),
        ({"dtype": "float16"}, "unknown dtype 'float16'"),
        ({"engine": "warp"}, "unknown engine 'warp'; choose from fast, reference"),
        ({"engine": "reference", "device": "cuda"}, "reference engine runs on cpu only"),
        ({"partition": "rings"}, "rings"),
        ({"absences": [[1, 2]]}, "it must be a list of [client, first round, last round]"),
        ({"absences": [[10, 1, 2]]}, "absent client is 10; it must be below 10"),
        ({"plugins": ["/nowhere/x.py"]}, "'/nowhere/x.py' cannot be read"),
        ({"recipe": 3}, "recipe is 3; it must be a text or a list of texts"),
        ({"recipe": ["lean", 3]}, "it must be a text or a list of texts"),
        ({"recipe": ","}, "unknown recipe ''"),
        ({"problem": 3}, "problem is 3; it must be a text"),
        ({"hold": 3}, "hold is 3; it must be 0 without a target"),
        ({"target": 1.5, "target_kind": "accuracy"}, "target accuracy is 1.5; it must be above 0"),
        ({"target": 1.5, "target_kind": "beauty"}, "unknown target_kind 'beauty'; choose from"),
        ({"target": 0.1, "hold": 20, "eval_every": 2}, "must be measured in every round"),
        ({"target": 0.1, "hold": 20, "rounds": 20}, "there must be more than 20"),
        ({"validation": 0.2}, "with target_kind residual"),
        ({"reset": 1}, "reset is 1; it must be true or false"),
        ({"optimizer": 3}, "optimizer is 3; it must be a text"),
        ({"optimizer": "adam:b1=2"}, "b1 is 2.0; it must be at least 0"),
        ({"scaling": "sum", "batch_size": 5}, "batch_size is 5 with scaling sum"),
        ({"scaling": "sum", "weighting": "samples"}, "with scaling sum"),
        ({"buffer_size": 3}, "buffer_size is 3 without speeds"),
        ({"link_mbit": 2.0}, "link_mbit is 2.0 without speeds"),
        ({"speeds": "equal", "buffer_size": 11, "local_steps": 2}, "buffer_size is 11; it must"),
        ({"speeds": "equal", "buffer_size": 3}, "mirror of every client"),
        ({"speeds": "equal", "buffer_size": 3, "recipe": "laq"}, "mirror of every client"),
        ({"speeds": "walk"}, "unknown speeds 'walk'; choose from equal, lognormal, strag"),
        ({"speeds": "lognormal:sigma=-1"}, "sigma is -1; it must be at least 0"),
        ({"speeds": "equal:seconds=0"}, "seconds is 0; it must be above 0"),
        ({"speeds": "stragglers:share=2"}, "share is 2; it must be at least 0 and at most"),
        ({"speeds": "equal", "outages": "random:chance=nan"}, "chance is nan"),
    ],
}


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [(make, *row) for make, rows in SPECS.items() for row in rows.items()]
    + [(make, *row) for make, rows in GIVEN.items() for row in rows],
)
def test_bad_settings_are_named(make, given, message):
    options = given if isinstance(given, dict) else {}
    arguments = () if options else given if isinstance(given, tuple) else (given,)
    with pytest.raises(DataError if make is dataset else ConfigError) as caught:
        make(*arguments, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", [n for n, r in table(RunSettings).items() if type(r.bound) is Bound]
)
def test_a_bound_is_named(name):
    value, message = outside(name)
    with pytest.raises(ConfigError) as caught:
        resolve({name: value})
    assert str(caught.value) == message


def outside(name):
    bound = table(RunSettings)[name].bound
    value = bound.low - (0 if bound.open_low else 1)
    value = float(value) if types(RunSettings)[name] in (float, float | None) else int(value)
    return value, f"{name} is {value}; it must be {bound}"


@pytest.mark.parametrize("name", ["participation", "batch_size"])
def test_whichever_way_it_comes(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, message = outside(name)
    (tmp_path / "run.toml").write_text(f"{name} = {json.dumps(value)}\n")
    flag = f"--{name.replace('_', '-')}={value}"
    for flags in ([flag], ["--set", f"{name}={value}"], ["--config", "run.toml"]):
        refuse(capsys, "run", *flags, message=message)


@pytest.mark.parametrize("kind", [RunSettings, FlowerSettings])
def test_every_default_is_a_value_that_the_setting_takes(kind):
    for field in fields(kind):
        if field.default is not MISSING:
            assert typed(kind, field.name, field.default) == field.default
            table(kind)[field.name].check(field.name, field.default)
        assert table(kind)[field.name].help.endswith((".", ")"))


def test_options_are_read_as_what_they_are():
    assert scaled("scale:3:loud:factor=2") == (3, 2.0, True)
    assert make_named("rule", "scale:loud=false", {"scale": scale}, 7) == (7, 1.0, False)
