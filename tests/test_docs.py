"""What documents say: commands and code run, links lead somewhere, facts and numbers are right.

Python sessions are doctests, run by pytest itself. Here: shell blocks are run in a temporary
directory, with few rounds; every ``aqg`` command in any page must be one that the command line
takes; TOML must be readable as what it is; plain Python must run. Then: what README, pages,
results and code state more than once agrees, and tables are those of the stored runs. And the site
builds without a warning, and takes nothing from the network.

Comments steer this: ``<!-- file: NAME -->`` before a block puts it into the directory under that
name, and ``<!-- not run: why -->`` leaves a block unrun.
"""

import ast
import csv
import os
import re
import runpy
import shlex
import shutil
import statistics
import sys
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from pydoc import locate
from typing import NamedTuple

import click
import pytest
import typer

import aqg
from aqg.cli.app import app, run_app
from aqg.core.auto import AVERAGE, AWAY, FIRST, LONGEST_FIRST, NOISE, RATIO, SHARE
from aqg.core.recipes import RECIPES
from aqg.core.step_sizes import DistanceOverGradients
from aqg.errors import DataError
from aqg.runs.config import SETTINGS, resolve
from aqg.runs.directory import read_summary
from aqg.runs.setup import build_problem
from aqg.studies.contest.plan import Outcome, Trial, make_config, read_outcomes
from aqg.studies.contest.search import FEDAVG, FORMER_STEP, SELF_SETTING, Setting
from aqg.studies.contest.tasks import TASKS
from aqg.studies.sweep import expand

from tests.commands import run, run_alone
from tests.problems import soak
from tests.studies.contest.test_plan import averaging, cells_of, outcome

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import readme  # noqa: E402
import reference  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("docs", "examples", "results", "benchmarks")
ALL_MARKDOWN = [*ROOT.glob("*.md"), *(p for d in FOLDERS for p in (ROOT / d).rglob("*.md"))]
GLOSSARY = ROOT / "docs/reference/glossary.md"
GENERATED = (reference.CLI_PAGE, reference.CONFIG_PAGE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TEXTS = {page: page.read_text(encoding="utf-8") for page in {*PAGES, *ALL_MARKDOWN}}
PROSE = {page: _FENCED.sub("", text) for page, text in TEXTS.items()}
README = TEXTS[ROOT / "README.md"]
DEFAULTS = [config.recipe for config in resolve({})]


def name_of(page):
    return page.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
ROUNDS = "3"
_SHELLS = ("sh", "console", "bash", "shell")
_BLOCK = re.compile(
    r"(?:<!-- (?P<word>file|not run): (?P<text>[^>]*?) -->\n)?"
    r"^```(?P<kind>[a-z]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_DATED = re.compile(r"\S*/[a-z]+-\d{8}-\d{6}")


class Block(NamedTuple):
    """A fenced block and the comment before it."""

    kind: str
    body: str
    file: str | None
    is_run: bool


def blocks(page):
    for match in _BLOCK.finditer(TEXTS[page]):
        file = match["text"].strip() if match["word"] == "file" else None
        yield Block(match["kind"], match["body"], file, match["word"] != "not run")


def commands(block):
    """Return the lines of a shell block, without comments."""
    joined = block.body.replace("\\\n", " ")
    lines = (line.strip().removeprefix("$ ") for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def pages_with_code():
    """Give the pages of which something is run; most of them are for a soak."""
    for page in PAGES:
        if any(block.is_run and block.kind in (*_SHELLS, "python") for block in blocks(page)):
            yield page if page.name in ("README.md", "own-model.md") else soak(page)


@each_page
def test_blocks_can_be_read_and_commands_are_those_that_there_are(page):
    for block in blocks(page):
        if block.kind == "":
            unmarked = [line for line in commands(block) if line.startswith(("aqg ", "python -m "))]
            assert not unmarked, "these are in a block without `sh`"
        elif block.kind in _SHELLS:
            for line in commands(block):
                if line.startswith("aqg "):
                    check_command(line, shlex.split(line, comments=True)[1:])
        elif block.kind == "python" and ">>>" not in block.body:
            ast.parse(block.body)
        elif block.kind == "toml":
            document = tomllib.loads(block.body)
            if {"grid", "run"} & set(document):
                expand(document)
            elif set(document) <= set(SETTINGS):
                resolve(document)


def check_command(line, arguments):
    """Paths need not exist here; options and their values must be right."""
    root = command = typer.main.get_command(app)
    while isinstance(command, click.Group):
        assert arguments, line
        command = command.get_command(click.Context(root), arguments.pop(0))
        assert command is not None, line
    command.make_context("aqg", arguments, resilient_parsing=False)


@pytest.mark.parametrize("page", [*pages_with_code()], ids=name_of)
def test_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(ROOT / "examples", "examples", ignore=shutil.ignore_patterns("flower*"))
    grid = Path("examples/sweep.toml")
    short = grid.read_text().replace("rounds = 200", "rounds = 2").replace("[0, 1, 2]", "[0]")
    short = short.replace('["iid", "label"]', '["label"]')
    grid.write_text(short)
    namespace = {"__name__": "document"}
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).write_text(block.body, encoding="utf-8")
        elif block.is_run and block.kind in _SHELLS:
            for line in commands(block):
                run_line(page, line, capsys)
        elif block.is_run and block.kind == "python" and ">>>" not in block.body:
            exec(compile(block.body, str(page), "exec", dont_inherit=True), namespace)


def run_line(page, line, capsys):
    """Run a line of a shell block; of other tools, see that what they are told exists."""
    words = shlex.split(line, comments=True)
    match words:
        case ["aqg", *arguments]:
            arguments = shortened(arguments)
            assert run_app(arguments) == 0, f"{line}: {capsys.readouterr().err}"
        case ["python", file] if file.endswith(".py"):
            runpy.run_path(file, run_name="__main__")
        case ["make", target]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
        case ["pip", "install", *packages]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
            extras = project["project"]["optional-dependencies"]
            for name in re.findall(r"aqg\[([a-z,]+)\]", " ".join(packages)):
                assert set(name.split(",")) <= set(extras), line
        case _:
            pytest.fail(f"{name_of(page)}: {line!r} is neither run nor marked as not run")


def shortened(arguments):
    """Let a command run for few rounds, on data that is there, and resume what was run last."""
    if any(_DATED.fullmatch(argument) for argument in arguments):
        latest = max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime)
        return [_DATED.sub(str(latest), argument) for argument in arguments]
    if arguments[0] == "run" and "--resume" not in arguments:
        arguments = ["digits" if argument == "mnist" else argument for argument in arguments]
        arguments += ["--rounds", ROUNDS]
    return arguments


def anchors(text):
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found = []
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.append(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", ALL_MARKDOWN, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PROSE[page]):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = Path(os.path.normpath(page.parent / path)) if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(PROSE[file]), target


@each_page
def test_files_are_named_for_the_reader(page):
    """The comment that names a file is not shown; the text before the block must name it, too."""
    for match in re.finditer(r"<!-- file: (\S+) -->", TEXTS[page]):
        before = TEXTS[page][max(0, match.start() - 400) : match.start()]
        assert f"`{match[1]}`" in before


def test_the_reference_of_commands_and_settings_is_that_of_the_code():
    """Write both anew with ``python tools/reference.py``."""
    assert reference.CLI_PAGE.read_text(encoding="utf-8") == reference.cli_page()
    assert reference.CONFIG_PAGE.read_text(encoding="utf-8") == reference.config_page()


def test_what_aqg_run_trains_is_what_pages_say():
    spoken = f"{', '.join(DEFAULTS[:-1])} and {DEFAULTS[-1]}"
    assert f"trains {spoken} on real digits" in README
    assert f"train {spoken} on digits" in (ROOT / "Makefile").read_text(encoding="utf-8")
    tutorial = TEXTS[ROOT / "docs/tutorials/first-run.md"]
    table = tutorial[tutorial.index("| recipe | what a client sends |") :].split("\n\n")[0]
    assert re.findall(r"^\| `([a-z0-9-]+)`", table, re.MULTILINE) == DEFAULTS
    assert re.findall(r"^ ([a-z0-9-]+) +\d\.\d{6}", README, re.MULTILINE) == DEFAULTS


_SIZE = {"B": 1, "kB": 1e3, "MB": 1e6}


def printed_rows(text):
    """Return loss, uploads and bytes up and down of each recipe in what ``aqg run`` prints."""
    row = r"^ ([a-z0-9-]+) +(\d\.\d{6}) .*? ([\d,]+) +[\d,]+ +([\d.]+) (k?M?B) +([\d.]+) (k?M?B) "
    return {
        name: (float(loss), int(num.replace(",", "")), float(up) * _SIZE[u], float(down) * _SIZE[d])
        for name, loss, num, up, u, down, d in re.findall(row, text, re.MULTILINE)
    }


@pytest.mark.soak
def test_the_readme_shows_what_aqg_run_prints(tmp_path, capsys):
    assert run_app(["run", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    ours, theirs = printed_rows(printed), printed_rows(README)
    assert list(ours) == list(theirs) == DEFAULTS
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=0.05), name  # machines round differently
    sentence = (
        r"500 rounds: test acc ([\d.]+)% \(gd: ([\d.]+)%\); (\d+) times fewer bytes up, (\d+)"
    )
    (mine,), (said,) = re.findall(sentence, printed), re.findall(sentence, README)
    assert [float(x) for x in mine] == pytest.approx([float(x) for x in said], rel=0.05)


def test_one_recipe_is_called_the_default():
    called = {
        (name_of(page), name)
        for page in PAGES
        for name in re.findall(r"`([a-z0-9-]+)`(?:,? \(?(?:is )?the default\b)(?! of)", TEXTS[page])
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


def test_the_numbers_of_the_default_and_of_adaptive_steps_are_those_of_the_code():
    page = TEXTS[ROOT / "docs/explanation/default-recipe.md"]
    told = set(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE))
    for text in (f"ν = {NOISE:g}", f"{FIRST:g}", f"{LONGEST_FIRST:g}", f"γ = {AVERAGE:g}"):
        assert text in told, text
    assert RATIO == AWAY == 0.5
    assert SHARE == 0.75
    assert "three quarters of the\nenergy" in page
    assert "`√p` times as many as a mean upload has" in page

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


@each_page
def test_options_scripts_and_modules_in_text_exist(page):
    folders = (ROOT / "benchmarks", ROOT / "examples")
    files = (path for folder in folders for path in folder.rglob("*.py"))
    scripts = "".join(path.read_text(encoding="utf-8") for path in files)
    known = options(typer.main.get_command(app))
    for code in re.findall(r"`([^`\n]+)`", PROSE[page]):
        if code.startswith(("flower-", "flwr ", "ray ", "pip ", "ssh-")):
            continue  # options of other tools
        for option in re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", code):
            assert option in known | OF_FLOWER or f'"{option}"' in scripts
    script = r"python (?:-m (aqg[\w.]*)|((?:benchmarks|tools|examples)/\S+\.py))"
    for module, file in re.findall(script, TEXTS[page]):
        assert (ROOT / file).is_file() if file else find_spec(module) is not None


def benchmarks_on_pages():
    texts = "".join(TEXTS[page] for page in ALL_MARKDOWN)
    for file in sorted(set(re.findall(r"python (benchmarks/\w+\.py)", texts))):
        if "argparse" in (ROOT / file).read_text(encoding="utf-8"):  # else it has no --help
            yield file


@pytest.mark.soak
@pytest.mark.parametrize("file", [*benchmarks_on_pages()])
def test_a_benchmark_starts_from_a_checkout_as_its_page_says(file):
    """Without what pytest adds to the path."""
    assert "usage:" in run(sys.executable, file, "--help", without="PYTHONPATH", cwd=ROOT)


_NUMBER = re.compile(r"^[*~<>]*[\d][\d,.]*(?:[eE][-−+]?\d+)?\s*(?:%|×|[kMG]?B|s|ms|kB/s)?\b")
_SOURCE = re.compile(
    r"python (?:-m aqg|benchmarks/|tools/)|aqg (?:run|compare|reproduce|sweep|theory)|results/"
)


def tables_of_numbers(text):
    """Yield the section of each table in which most cells after the first are numbers."""
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            rows = [line.strip().strip("|").split("|") for line in table.splitlines()[2:]]
            cells = [cell.strip(" *`") for row in rows for cell in row[1:]]
            filled = [cell for cell in cells if cell]
            if len(filled) >= 4 and sum(bool(_NUMBER.match(c)) for c in filled) > len(filled) / 2:
                yield section


@each_page
def test_tables_of_numbers_name_where_they_come_from(page):
    if page in GENERATED or page.name == "frame-format.md":  # bytes of the format, not measured
        return
    for section in tables_of_numbers(PROSE[page]):
        heading = section.splitlines()[0]
        source = section if _SOURCE.search(section) else TEXTS[page][: TEXTS[page].find("\n## ")]
        assert _SOURCE.search(source), f"{heading!r} names no command"


def test_versions_agree():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (?:\[)?([^\]\s]+)", changelog, re.MULTILINE)
    assert headings[0] in (aqg.__version__, "Unreleased")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"]


PRIVATE = re.compile(
    r"(?<![a-z])(trickl\w*|ow(?:es|ed|ing)|debts?|calm|knobs?|shouts?|dear(?:er|est)?|silent"
    r"|hear(?:s|d|ing)?|spoken?|speakers?)(?![a-z])",
    re.IGNORECASE,
)


@each_page
def test_prose_can_be_read(page):
    without_code = re.sub(r"`[^`\n]*`", "", PROSE[page])
    assert not re.findall(r"\b(?:TODO|TBD|FIXME|XXX)\b|\| [A-Z]{4,} \|", without_code)
    for line in PROSE[page].splitlines():  # GitHub and the site read a bar in code differently
        codes = re.findall(r"`([^`]*)`", line) if line.startswith("|") else []
        assert not [code for code in codes if "|" in code], line
    if page in GENERATED:
        return
    text = re.sub(r"<!-- (?:table|text): .*?<!-- end -->", "", PROSE[page], flags=re.DOTALL)
    assert not [line for line in text.splitlines() if len(line) > 160], "rows fit on a screen"


def test_pages_and_code_use_the_words_of_the_field():
    texts = {
        page: re.sub(r"`[^`\n]*`", "", PROSE[page]) for page in {*PAGES} - {GLOSSARY, *GENERATED}
    }
    texts |= {file: file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py")}
    found = {(str(file), word) for file, text in texts.items() for word in PRIVATE.findall(text)}
    assert not found, "docs/reference/glossary.md has the words to use"


def is_there(name):
    """Tell whether a dotted name is a module, something in one, or a field of a class."""
    owner, _, field = name.rpartition(".")
    return locate(name) is not None or field in getattr(locate(owner), "__annotations__", {})


def test_the_equations_are_where_the_page_says():
    text = TEXTS[ROOT / "docs/explanation/algorithm.md"]
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", text[: text.index("## Grids")], re.MULTILINE)
    names = [name for cell in rows for name in re.findall(r"`([A-Za-z_.]+)`", cell)]
    assert len(names) > 20
    missing = [n for n in names if not any(is_there(prefix + n) for prefix in ("", "aqg.core."))]
    assert set(missing) <= {"losses_and_gradients", "largest_step_size"}  # named after a module


def measured():
    """Return megabytes and rounds, medians of the seeds, by task, clients and downlink."""
    found = {}
    with (ROOT / "results/downlinks/runs.csv").open() as file:
        for row in csv.DictReader(file):
            assert row["reached"] == "1"
            total = (int(row["upload_bytes"]) + int(row["download_bytes"])) / 1e6
            key = (row["task"], int(row["clients"]), row["downlink"])
            found.setdefault(key, []).append((total, int(row["rounds"])))
    return {
        key: tuple(map(statistics.median, zip(*rows, strict=True))) for key, rows in found.items()
    }


def rows_of(page, heading):
    table = page[page.index(heading) :].split("\n\n")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [[cell.strip().strip("*") for cell in line] for line in lines]


def check(text, value):
    """Compare a number with as many digits as the page has."""
    digits = len(text.partition(".")[2])
    assert text == f"{value:.{digits}f}"


def test_the_tables_on_downlinks_are_the_data():
    page, runs, used = TEXTS[ROOT / "docs/explanation/downlink.md"], measured(), set()

    def compare(key, *cells):
        used.add(key)
        for text, value in zip(cells, runs[key], strict=True):
            check(text, value)

    for row in rows_of(page, "| task | `full`"):
        task = row[0].split("`")[1]
        clients = 100 if "of 100" in row[0] else 10
        if row[2]:
            compare((task, clients, "exact"), row[2], row[4])
            check(row[1], 10 * 636_040 * int(row[4]) / 1e6)
        compare((task, clients, "condensed"), row[3], row[5])
    for row in rows_of(page, "| clients | `exact`"):
        clients = int(row[0].split(", ")[0].replace(",", ""))
        task = "digits-local" if clients < 1000 else "sampled-iid"
        downlink = row[0].split("`")[1] if "`" in row[0] else "condensed"
        if row[1]:
            compare((task, clients, "exact"), row[1], row[3])
        compare((task, clients, downlink), row[2], row[4])
    assert set(runs) == used


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_runs(page):
    assert "<!-- table: " in TEXTS[page]
    assert readme.refreshed(page) == TEXTS[page]


def test_the_readme_has_one_table_with_every_task_that_was_run():
    assert README.count("<!-- table: ") == 1
    names = [row[0].partition(":")[0] for row in readme.field_table().rows]
    measured = [task for task in TASKS.values() if task.goal.target is None]
    assert {task.name for task in measured if not task.is_hold_out} <= set(names)
    assert set(readme.NUM_PARAMS) == {task.name for task in measured}


def test_the_best_of_the_field_is_the_cheapest_that_several_seeds_show():
    found = averaging()
    for recipe, size, seeds in (("stc", 2, 1), ("qsgd", 3, 3), ("topk", 5, 3), ("auto", 1, 3)):
        setting = Setting(recipe, multiplier=0.0)
        found += [outcome(recipe, setting, seed, 4, size=size) for seed in range(seeds)]
    best = readme.best_of_the_field(cells_of(found, "stc,qsgd,topk,auto").values())
    assert best is not None
    assert best.recipe == "qsgd"


@pytest.mark.parametrize("name", ["digits-local", "heart", "watch", "unseen-synthetic"])
def test_the_readme_counts_parameters_as_they_are(name, data_dir):
    try:
        problem = build_problem(TASKS[name].config, data_dir)
    except DataError as error:
        pytest.skip(str(error))
    assert len(problem.initial_params) == readme.NUM_PARAMS[name]


def run_trial(trial, directory, **changes):
    run_alone(replace(make_config(trial, TASKS[trial.task], None), **changes), directory)
    return Outcome.of_run(trial, read_summary(directory), 0.0)


def test_stored_bytes_are_those_of_a_run_today(tmp_path):
    trial = Trial("digits-local", FEDAVG, Setting(FEDAVG), 0)
    stored = read_outcomes(readme.SMALL)[trial]
    fresh = run_trial(trial, tmp_path / "run", rounds=3, eval_every=1)
    assert fresh.curve.total_bytes == pytest.approx(stored.curve.total_bytes[:4], rel=0.01)


@pytest.mark.soak
def test_a_stored_result_comes_out_again(tmp_path):
    """The whole run, as stored: what it learns and what it sends, on another processor as well."""
    trial = Trial("digits-local", "auto", Setting("auto", multiplier=SELF_SETTING), 0)
    stored = read_outcomes(readme.SMALL)[trial].curve
    fresh = run_trial(trial, tmp_path / "run").curve
    assert fresh.total_bytes == pytest.approx(stored.total_bytes, rel=0.01)
    assert fresh.values == pytest.approx(stored.values, abs=0.02)


def test_runs_of_the_former_default_are_kept_apart():
    for folder in (readme.SMALL, readme.MNIST, readme.LARGE):
        for trial in read_outcomes(folder):
            is_former = trial.setting.multiplier == FORMER_STEP
            assert not (is_former and trial.recipe in (FEDAVG, "auto"))


_LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?P<src>[^\s\">]+)"
    r"|<link(?P<link>[^>]*)>"
    r"|url\((?P<url>[^)]+)\)"
    r"|@import\s+[\"'](?P<imported>[^\"']+)"
)
_HREF = re.compile(r"\shref=\"?([^\s\">]+)")


def loaded_from(text):
    """Yield what a browser fetches to show a page or a stylesheet."""
    for match in _LOADED.finditer(text):
        if match["link"] is None:
            yield match["src"] or match["url"] or match["imported"]
        elif re.search(r"rel=\"?(stylesheet|icon|preload|preconnect|dns-prefetch)", match["link"]):
            yield from _HREF.findall(match["link"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if find_spec("zensical") is None or find_spec("mkdocstrings") is None:
        pytest.skip("needs the site generator: pip install 'aqg[docs]'")
    place = tmp_path_factory.mktemp("site") / "site"
    run(sys.executable, str(ROOT / "tools" / "site.py"), str(place))
    return place


@pytest.mark.soak
def test_every_page_is_built_with_its_pictures_and_fetches_nothing_from_elsewhere(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = file.read_text(encoding="utf-8")
        for target in loaded_from(text):
            address = target.strip("\"'")
            assert not re.match(r"(https?:)?//", address), f"{file.relative_to(site)}: {address}"
        for source in re.findall(r"<img[^>]*\ssrc=\"?([^\s\">]+)", text):
            assert (file.parent / source).exists() or source.startswith("data:"), (file, source)


@pytest.mark.soak
def test_the_public_names_are_in_the_reference(site):
    import aqg.flower

    text = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for module in (aqg, aqg.sim, aqg.protocol, aqg.flower):
        for name in set(module.__all__) - {"__version__"}:
            assert re.search(rf'id="?{module.__name__}.{name}\b', text), name
