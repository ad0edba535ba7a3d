"""Settings: where they come from, what is refused, and how."""

import tomllib

import pytest

from aqg.core.step_sizes import DistanceOverGradients, Fixed
from aqg.errors import ConfigError
from aqg.runs.config import names_step, parse_assignment, resolve, to_toml

from tests.commands import plugin


def test_defaults_are_the_demo_and_steps_those_of_the_dataset():
    configs = resolve({})
    assert [config.recipe for config in configs] == ["auto", "gd", "laq"]
    assert {(c.dataset, c.partition, c.clients) for c in configs} == {("digits", "label", 10)}
    for scaling, alpha in (("mean", 0.008), ("sum", 0.0015)):
        (config,) = resolve({"dataset": "heterogeneous", "scaling": scaling, "recipe": "laq"})
        assert config.alpha == alpha
    assert resolve({"dataset": "heterogeneous", "alpha": 1})[0].alpha == 1.0


def test_toml_round_trip():
    settings = {"recipe": "lean:eta=0.25,aqg-2", "absences": [[3, 10, 20]], "plugins": []}
    settings |= {"target": 1e-6, "dropout": 0.25}
    configs = resolve(settings)
    assert resolve(tomllib.loads(to_toml(configs))) == configs
    assert resolve(tomllib.loads(to_toml(configs[:1]))) == configs[:1]


def test_assignments():
    for text, expected in {
        "alpha=1e-3": ("alpha", 1e-3),
        "model = mlp:20": ("model", "mlp:20"),
        "absences=[[1, 2, 3]]": ("absences", [[1, 2, 3]]),
        'recipe="lean"': ("recipe", "lean"),
    }.items():
        assert parse_assignment(text) == expected


def test_plugins_add_recipes(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(plugin("mine", "pass"))
    for _ in range(2):  # loading it again is fine
        (config,) = resolve({"recipe": "mine", "plugins": [str(file)]})
        assert config.recipe == "mine"
    file.write_text("1 / 0")
    with pytest.raises(ConfigError, match="cannot be run: ZeroDivisionError"):
        resolve({"plugins": [str(file)]})


def test_a_step_that_sets_itself_has_averagings_step_as_its_scale():
    local = {"dataset": "mnist", "batch_size": 64, "local_steps": 5, "local_rate": 0.1}
    (config,) = resolve({**local, "recipe": "auto", "step": "auto"})
    assert config.alpha == pytest.approx(0.1 * 5 / 10)
    assert config.training().step == DistanceOverGradients()
    (plain,) = resolve({**local, "recipe": "fedavg"})
    assert (plain.alpha, plain.step) == (config.alpha, "fixed")
    (exact,) = resolve({"dataset": "mnist", "recipe": "auto", "step": "auto"})
    assert exact.alpha == 0.02
    assert exact.training().step == Fixed()
    (given,) = resolve({**local, "recipe": "auto", "step": "dog", "alpha": 0.3})
    assert given.alpha == 0.3
    epochs = {"dataset": "digits", "batch_size": 20, "local_epochs": 2, "step": "auto"}
    assert resolve(epochs)[0].alpha == pytest.approx(0.1 * 2 * 8 / 10)  # 144 samples each


def test_who_names_a_step(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("SETTINGS = {'alpha': 0.1}\n")
    assert names_step({"alpha": 0.1})
    assert names_step({"step": "fixed"})
    assert names_step({"problem": f"{file}:make"})
    assert not names_step({"rounds": 3})
    file.write_text("SETTINGS = {'rounds': 3}\n")
    assert not names_step({"problem": f"{file}:make"})
    for settings, message in (
        ("{'colour': 1}", "unknown setting 'colour'"),
        ("{'rounds': 'x'}", "rounds is 'x'; it must be a whole number"),
        ("3", "SETTINGS in .* is 3; it must be a dict"),
    ):
        file.write_text(f"SETTINGS = {settings}\n")
        with pytest.raises(ConfigError, match=message):
            resolve({"problem": f"{file}:make"})
