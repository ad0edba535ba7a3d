"""The table of settings: whichever way a wrong value comes, the same error names it."""

import json
from dataclasses import MISSING, fields

import pytest

from aqg.errors import ConfigError
from aqg.runs.config import resolve
from aqg.settings import Bound, FlowerSettings, RunSettings, table, typed, types
from aqg.spec import make_named

from tests.commands import refuse


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
    for flags in (
        [f"--{name.replace('_', '-')}={value}"],
        ["--set", f"{name}={value}"],
        ["--config", "run.toml"],
    ):
        refuse(capsys, "run", *flags, message=message)


@pytest.mark.parametrize("kind", [RunSettings, FlowerSettings])
def test_every_default_is_a_value_that_the_setting_takes(kind):
    for field in fields(kind):
        if field.default is not MISSING:
            assert typed(kind, field.name, field.default) == field.default
            table(kind)[field.name].check(field.name, field.default)
        assert table(kind)[field.name].help.endswith((".", ")"))


def scale(number: int, *, factor: float = 1.0, loud: bool = False):
    return number, factor, loud


def test_options_are_read_as_what_they_are():
    makers = {"scale": scale}
    assert make_named("rule", "scale:3:loud:factor=2", makers) == (3, 2.0, True)
    assert make_named("rule", "scale:loud=false", makers, 7) == (7, 1.0, False)
    for spec, message in {
        "grow": "unknown rule 'grow'; choose from auto, scale",
        "scale": "rule 'scale' needs a value, as in scale:NUMBER",
        "scale:2.5": "option number of rule 'scale' is '2.5'; it must be a whole number",
        "scale:1:factor=x": "option factor of rule 'scale' is 'x'; it must be a number",
        "scale:1:loud=2": "option loud of rule 'scale' is '2'; it must be true or false",
        "scale:1:2": "rule 'scale' has no option '2'; it has: number, factor, loud",
        "scale:1:factor=1:factor=2": "option factor of rule 'scale' is given twice",
    }.items():
        with pytest.raises(ConfigError) as caught:
            make_named("rule", spec, makers, also=("auto",))
        assert str(caught.value).startswith(message)
