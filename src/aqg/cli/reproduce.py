"""``aqg reproduce``: run the paper's experiments, print its figures beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from aqg.cli.study import Where
    from aqg.runs.table import Table
    from aqg.studies.paper.outcomes import Results
    from aqg.studies.paper.plan import PlannedRun


def reproduce(
    quick: Annotated[
        bool, typer.Option("--quick", help="Shortened for a laptop: minutes on two cores.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for runs, tables and pictures; goes on with what is there. "
            "runs/reproduce or runs/reproduce-quick by default."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="For MNIST; the GPU by default if there is one."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time; one per core by default.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="table2|logistic|rounding|softmax|dropouts|network",
            help="Only these parts, separated by commas.",
        ),
    ] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", help="Run nothing: show the results in this directory.")
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            help="With --from: results of the same command from elsewhere. Seeds that are missing "
            "are added, and another machine's logistic runs are kept to compare."
        ),
    ] = None,
    missing: Annotated[
        Path | None,
        typer.Option("--missing-from", help="Only runs that the results in this directory lack."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="AQG_DATA_DIR", help="Where datasets are kept.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the Ray cluster there.")
    ] = None,
) -> int:
    """Run the paper's experiments again and print its figures beside ours.

    Its Table 2 and Figures 5 to 10 over several seeds, logistic runs with data that differ in the
    last bit, and the 784-200-10 network. Ctrl-C saves everything; the same command goes on and
    repeats nothing that is finished.
    """
    from rich.console import Console

    from aqg.cli.study import Where
    from aqg.errors import ConfigError
    from aqg.studies.paper.execute import keep_beside, keep_results, missing_from
    from aqg.studies.paper.outcomes import read_results
    from aqg.studies.paper.plan import FULL, QUICK, make_plan, parse_sections

    console = Console()
    if saved is not None:
        if quick or any(option is not None for option in (out, only, missing)):
            raise ConfigError(
                "--from runs nothing: it goes with none of --quick, --out, --only, --missing-from"
            )
        if beside is not None:
            keep_beside(saved, beside)
        show_results(console, read_results(saved))
        return 0
    if beside is not None:
        raise ConfigError("--beside goes with --from: both directories hold finished results")
    sections = parse_sections(only)
    scale = QUICK if quick else FULL
    directory = out or Path("runs") / ("reproduce-quick" if quick else "reproduce")
    plan = make_plan(scale, device or _best_device(), sections)
    if missing is not None:
        plan = missing_from(missing, plan)
    code = run_plan(console, plan, directory, Where(jobs, cluster, data_dir))
    results = keep_results(plan, scale, directory)
    show_results(console, results)
    console.print(f"Tables, pictures and data: {directory}", highlight=False, soft_wrap=True)
    return code


def _best_device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_plan(console: Console, plan: tuple[PlannedRun, ...], directory: Path, where: Where) -> int:
    """Do what is unfinished; return the exit code."""
    from aqg.cli.display import Overview
    from aqg.cli.study import lock, report_failures, run_study
    from aqg.runs.cost import add_bytes
    from aqg.runs.directory import read_summary
    from aqg.runs.plan import Batch
    from aqg.studies.paper.execute import RUN_DIRECTORY, adopt_devices

    plan = adopt_devices(plan, directory)
    runs = directory / RUN_DIRECTORY
    with lock(runs):
        batch = Batch((planned.run for planned in plan), runs)
        left = {job.name for job in batch.left}
        console.print(
            f"{len(plan)} runs, {len(plan) - len(left)} finished before, "
            f"{where.describe(len(left))}, in {directory}",
            highlight=False,
            soft_wrap=True,
        )
        if not left:
            return 0
        done = [planned.run for planned in plan if planned.run.name not in left]
        summaries = [read_summary(runs / run.name) or {} for run in done]
        spent = add_bytes(*(summary.get("total_bytes") for summary in summaries))
        run_study(
            console,
            batch,
            runs,
            where,
            lambda: Overview(console, batch, "reproduce", len(plan) - len(left), spent),
            lambda: runs.mkdir(parents=True, exist_ok=True),
            lambda: (
                f"stopped with {len(plan) - batch.most_left()} of {len(plan)} runs finished; "
                "everything is saved, and the same command goes on"
            ),
        )
        return report_failures(batch, len(plan), "the same command tries them again")


def show_results(console: Console, results: Results) -> None:
    """Print every table, and what was shortened."""
    from aqg.studies.paper.tables import all_tables

    if not console.is_terminal:
        console.width = max(console.width, 200)  # a file has no edge to wrap at
    for note in results.about["notes"]:
        console.print(f"Shortened: {note}", style="yellow", highlight=False, soft_wrap=True)
    for section, (done, planned) in results.about.get("finished", {}).items():
        if done < planned:
            text = f"Not finished: {section}, {done} of {planned} runs"
            console.print(text, style="yellow", highlight=False, soft_wrap=True)
    for table in all_tables(results):
        _print_table(console, table)


def _print_table(console: Console, table: Table) -> None:
    console.print(f"\n[bold]{table.title.replace('`', '')}[/bold]")
    console.print(table.note.replace("`", ""), style="dim", highlight=False)
    console.print(table.to_terminal())
