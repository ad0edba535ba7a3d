"""Facts that README, pages, results and code state more than once agree."""

import csv
import re
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import typer

import aqg
from aqg.cli.app import app, run_app
from aqg.core.auto import AVERAGE, FIRST, LONGEST_FIRST, NOISE, RATIO
from aqg.core.recipes import RECIPES
from aqg.core.step_sizes import DistanceOverGradients
from aqg.runs.config import resolve

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import reference  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GLOSSARY = ROOT / "docs/reference/glossary.md"
GENERATED = (reference.CLI_PAGE, reference.CONFIG_PAGE)
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
DEFAULTS = [config.recipe for config in resolve({})]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def test_the_reference_of_commands_and_settings_is_that_of_the_code():
    """Write both anew with ``python tools/reference.py``."""
    assert reference.CLI_PAGE.read_text(encoding="utf-8") == reference.cli_page()
    assert reference.CONFIG_PAGE.read_text(encoding="utf-8") == reference.config_page()


def test_what_aqg_run_trains_is_what_pages_say():
    spoken = f"{', '.join(DEFAULTS[:-1])} and {DEFAULTS[-1]}"
    assert f"trains {spoken} on real digits" in TEXTS[ROOT / "README.md"]
    assert f"train {spoken} on digits" in (ROOT / "Makefile").read_text(encoding="utf-8")
    tutorial = TEXTS[ROOT / "docs/tutorials/first-run.md"]
    table = tutorial[tutorial.index("| recipe | what a client sends |") :].split("\n\n")[0]
    assert re.findall(r"^\| `([a-z0-9-]+)`", table, re.MULTILINE) == DEFAULTS
    printed = re.findall(r"^ ([a-z0-9-]+) +\d\.\d{6}", TEXTS[ROOT / "README.md"], re.MULTILINE)
    assert printed == DEFAULTS


_SIZE = {"B": 1, "kB": 1e3, "MB": 1e6}


def printed_rows(text):
    """Return loss, uploads and bytes up and down of each recipe in what ``aqg run`` prints."""
    row = r"^ ([a-z0-9-]+) +(\d\.\d{6}) .*? ([\d,]+) +[\d,]+ +([\d.]+) (k?M?B) +([\d.]+) (k?M?B) "
    return {
        name: (
            float(loss),
            int(uploads.replace(",", "")),
            float(up) * _SIZE[up_unit],
            float(down) * _SIZE[down_unit],
        )
        for name, loss, uploads, up, up_unit, down, down_unit in re.findall(row, text, re.MULTILINE)
    }


@pytest.mark.soak
def test_the_readme_shows_what_aqg_run_prints(tmp_path, capsys):
    assert run_app(["run", "--out", str(tmp_path / "out")]) == 0
    printed, shown = capsys.readouterr().out, TEXTS[ROOT / "README.md"]
    ours, theirs = printed_rows(printed), printed_rows(shown)
    assert list(ours) == list(theirs) == DEFAULTS
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=0.05), name  # machines round differently
    sentence = (
        r"after 500 rounds: test acc ([\d.]+)% \(gd: ([\d.]+)%\); (\d+) times fewer bytes up, (\d+)"
    )
    (mine,), (said,) = re.findall(sentence, printed), re.findall(sentence, shown)
    assert [float(x) for x in mine] == pytest.approx([float(x) for x in said], rel=0.05)


def test_one_recipe_is_called_the_default():
    called = {
        (name_of(page), name)
        for page, text in TEXTS.items()
        for name in re.findall(r"`([a-z0-9-]+)`(?:,? \(?(?:is )?the default\b)(?! of)", text)
    }
    assert called, "no page says which recipe is the default"
    assert {name for _, name in called} == {DEFAULTS[0]}, called


def test_every_recipe_has_its_formula_and_every_name_is_a_recipe():
    text = TEXTS[ROOT / "docs/reference/recipes.md"]
    for name in RECIPES:
        assert re.search(rf"^\| [^|]*`{name}`", text, re.MULTILINE), name
    rows = re.findall(r"^\| ((?:`[a-z0-9-]+`(?:, | ‡)?)+)(?:, [a-z ]+)? *\|", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)}
    assert named == set(RECIPES)


OF_FLOWER = {"--isolation", "--database", "--run-config", "--runtime-api-address"}
"""Options of Flower's commands that pages name by themselves."""


def test_the_numbers_of_the_default_are_those_of_the_code():
    page = TEXTS[ROOT / "docs/explanation/default-recipe.md"]
    told = {match for row in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE) for match in [row]}
    for text in (f"ν = {NOISE:g}", f"{FIRST:g}", f"{LONGEST_FIRST:g}", f"γ = {AVERAGE:g}"):
        assert text in told, text
    assert RATIO == 0.5
    assert "half as many as a mean upload" in page


def test_the_bounds_of_adaptive_steps_are_those_of_the_code():
    text = " ".join(TEXTS[ROOT / "docs/explanation/step-size.md"].split())
    rule = DistanceOverGradients()
    assert f"the first step has at most {rule.widest:g} times the length" in text
    assert f"`γ = {rule.average:g}`" in text
    assert rule.first == 0.2
    assert "here a fifth of it" in text


def options(command):
    found = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    if isinstance(command, click.Group):
        for part in command.commands.values():
            found |= options(part)
    return found | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_in_text_exist(page):
    scripts = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    )
    known = options(typer.main.get_command(app))
    prose = _FENCED.sub("", TEXTS[page])
    for code in re.findall(r"`([^`\n]+)`", prose):
        if code.startswith(("flower-", "flwr ", "ray ", "pip ", "ssh-")):
            continue  # options of other tools
        for option in re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", code):
            assert option in known | OF_FLOWER or f'"{option}"' in scripts, (
                f"{name_of(page)}: {option}"
            )


_SCRIPT = re.compile(
    r"python (?:-m (?P<module>aqg[\w.]*)|(?P<file>(?:benchmarks|tools|examples)/\S+\.py))"
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_scripts_and_modules_in_text_exist(page):
    for match in _SCRIPT.finditer(TEXTS[page]):
        if match["module"]:
            assert find_spec(match["module"]) is not None, match[0]
        else:
            assert (ROOT / match["file"]).is_file(), f"{name_of(page)}: {match[0]}"


_NUMBER = re.compile(r"^[*~<>]*[\d][\d,.]*(?:[eE][-−+]?\d+)?\s*(?:%|×|[kMG]?B|s|ms|kB/s)?\b")
_SOURCE = re.compile(
    r"python (?:-m aqg|benchmarks/|tools/)|aqg (?:run|compare|reproduce|sweep|theory)|results/"
)


def tables_of_numbers(text):
    """Yield the section of each table in which most cells after the first are numbers."""
    for section in re.split(r"^(?=## )", _FENCED.sub("", text), flags=re.MULTILINE):
        for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            rows = [line.strip().strip("|").split("|") for line in table.splitlines()[2:]]
            cells = [cell.strip(" *`") for row in rows for cell in row[1:]]
            filled = [cell for cell in cells if cell]
            if len(filled) >= 4 and sum(bool(_NUMBER.match(c)) for c in filled) > len(filled) / 2:
                yield section


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_of_numbers_name_where_they_come_from(page):
    if page in GENERATED or page.name == "frame-format.md":  # bytes of the format, not measured
        return
    for section in tables_of_numbers(TEXTS[page]):
        heading = section.splitlines()[0]
        source = section if _SOURCE.search(section) else TEXTS[page][: TEXTS[page].find("\n## ")]
        assert _SOURCE.search(source), f"{name_of(page)}: {heading!r} names no command"


def test_a_table_of_numbers_is_known_as_one():
    table = "## A\n\n| a | b | c |\n|---|---|---|\n| x | 1.5 MB | 3× |\n| y | 2 | 4 % |\n"
    assert list(tables_of_numbers(table)) == [table]
    assert not list(
        tables_of_numbers("## A\n\n| a | b |\n|---|---|\n| x | words |\n| y | more |\n")
    )


def test_versions_agree():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (?:\[)?([^\]\s]+)", changelog, re.MULTILINE)
    assert headings[0] in (aqg.__version__, "Unreleased")
    citation = ROOT / "CITATION.cff"
    if citation.exists():
        text = citation.read_text(encoding="utf-8")
        assert re.search(
            rf"^version: [\"']?{re.escape(aqg.__version__)}[\"']?$", text, re.MULTILINE
        )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"]


def test_the_comparison_says_what_its_data_say():
    with (ROOT / "results/compare/results.csv").open(newline="") as file:
        cells = [
            row | {"ratio": float(row["ratio"]) if row["ratio"] else None}
            for row in csv.DictReader(file)
        ]
    page = " ".join(TEXTS[ROOT / "docs/explanation/comparison.md"].split())
    tasks, recipes = {c["task"] for c in cells}, {c["recipe"] for c in cells}
    assert f"{len(recipes)} recipes on {len(tasks)} tasks" in page
    ratios = {c["task"]: c["ratio"] for c in cells if c["recipe"] == "auto"}
    close = [task for task, ratio in ratios.items() if ratio <= 1.1]
    assert f"within a tenth of it on {len(close)} of {len(tasks)} tasks" in page
    for task, ratio in ratios.items():
        if task not in close:
            assert re.search(rf"`{task}` \({ratio:.2f}", page), (task, ratio)
    exact = {c["task"] for c in cells if re.match("digits-soft|logistic|softmax|mlp", c["task"])}
    lazy = {"lag", "laq", "aqg", "aqg-2", "aqg-augmented", "lean", "auto", "clag", "aquila"}
    best = []
    for task in tasks:
        found = {c["recipe"]: c["ratio"] for c in cells if c["task"] == task and c["ratio"]}
        winner = min(found, key=found.__getitem__)
        if task in exact:
            assert winner in ("auto", "lean")
            best.append(min(ratio for recipe, ratio in found.items() if recipe not in lazy))
        else:
            assert winner in ("auto", "stc", "qsgd", "fedpaq", "dadaquant")
    assert f"needs {min(best):.1f} to {max(best):.1f} times as many bytes" in page


PRIVATE = re.compile(
    r"(?<![a-z])(trickl\w*|ow(?:es|ed|ing)|debts?|calm|knobs?|shouts?|dear(?:er|est)?|silent"
    r"|hear(?:s|d|ing)?|spoken?|speakers?)(?![a-z])",
    re.IGNORECASE,
)
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("page", [p for p in PAGES if p not in (GLOSSARY, *GENERATED)], ids=name_of)
def test_pages_use_the_words_of_the_field(page):
    prose = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", TEXTS[page]))
    assert not PRIVATE.findall(prose), "docs/reference/glossary.md has the words to use"


def test_code_uses_the_words_of_the_field():
    found = {
        (name_of(file), word)
        for file in SOURCES
        for word in PRIVATE.findall(file.read_text(encoding="utf-8"))
    }
    assert not found, "docs/reference/glossary.md has the words to use"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_rows_fit_on_a_screen(page):
    if page in GENERATED:
        return
    text = re.sub(r"<!-- (?:table|text): .*?<!-- end -->", "", TEXTS[page], flags=re.DOTALL)
    wide = [line for line in _FENCED.sub("", text).splitlines() if len(line) > 160]
    assert not wide, f"{name_of(page)}: {wide[0]}"


_PREFIXES = ("", "aqg.core.")


def is_there(name):
    """Tell whether a dotted name is a module or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None) or getattr(found, "__annotations__", {}).get(part)
        return found is not None
    return False


def test_the_equations_are_where_the_page_says():
    text = TEXTS[ROOT / "docs/explanation/algorithm.md"]
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", text[: text.index("## Grids")], re.MULTILINE)
    names = [name for cell in rows for name in re.findall(r"`([A-Za-z_.]+)`", cell)]
    assert len(names) > 20
    missing = [n for n in names if not any(is_there(prefix + n) for prefix in _PREFIXES)]
    assert set(missing) <= {"losses_and_gradients", "largest_step_size"}  # named after a module


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_bar_stands_within_code_in_a_table(page):
    """GitHub and the site read an escaped bar within code differently."""
    for line in _FENCED.sub("", TEXTS[page]).splitlines():
        if line.startswith("|"):
            assert not [code for code in re.findall(r"`([^`]*)`", line) if "|" in code], line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_nothing_is_left_to_fill_in(page):
    prose = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", TEXTS[page]))
    assert not re.findall(r"\b(?:TODO|TBD|FIXME|XXX)\b|\| [A-Z]{4,} \|", prose)
