"""``aqg reproduce``: run the paper's experiments, print its figures beside ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from aqg.experiments.sweep import SweepRun
    from aqg.reproduce.cells import Table
    from aqg.reproduce.outcomes import Results
    from aqg.reproduce.plan import PlannedRun
    from aqg.reproduce.rounding import PerturbedRun


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
        Path | None,
        typer.Option("--from", help="Run nothing: show the results in this directory."),
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
) -> int:
    """Run the paper's experiments again and print its figures beside ours.

    Its Table 2 and Figures 5 to 10 over several seeds, logistic runs with data that differ in the
    last bit, and the 784-200-10 network. Ctrl-C saves everything; the same command goes on and
    repeats nothing that is finished.
    """
    from rich.console import Console

    from aqg.errors import ConfigError
    from aqg.reproduce.execute import keep_results
    from aqg.reproduce.merge import keep_beside, missing_from
    from aqg.reproduce.outcomes import read_results
    from aqg.reproduce.plan import FULL, QUICK, make_perturbed, make_plan, parse_sections

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
    perturbed = make_perturbed(scale, data_dir, sections)
    if missing is not None:
        plan, perturbed = missing_from(missing, plan, perturbed)
    failures = run_plan(console, plan, directory, jobs, data_dir, perturbed)
    results = keep_results(plan, scale, directory)
    show_results(console, results)
    console.print(f"Tables, pictures and data: {directory}", highlight=False, soft_wrap=True)
    return 1 if failures else 0


def _best_device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_plan(
    console: Console,
    plan: tuple[PlannedRun, ...],
    directory: Path,
    jobs: int | None,
    data_dir: Path | None,
    perturbed: tuple[PerturbedRun, ...] = (),
) -> int:
    """Do what is unfinished; return how many runs failed."""
    from aqg.cli.sweep_display import Overview
    from aqg.experiments import runner
    from aqg.experiments.summary import add_bytes
    from aqg.experiments.sweep import read_summary
    from aqg.experiments.sweep_tasks import by_problem, run_all
    from aqg.experiments.workers import Workers, default_jobs
    from aqg.reproduce.execute import RUN_DIRECTORY, adopt_devices, find_minima, still_to_do
    from aqg.reproduce.rounding import left_to_do, run_perturbed

    plan = adopt_devices(plan, directory)
    left: list[SweepRun] = by_problem(still_to_do(plan, directory))
    workers = Workers(default_jobs() if jobs is None else jobs)
    console.print(
        f"{len(plan)} runs, {len(plan) - len(left)} finished before, "
        f"{workers.jobs} at a time, in {directory}",
        highlight=False,
        soft_wrap=True,
    )
    tasks = left_to_do(perturbed, directory)
    if perturbed:
        console.print(
            f"{len(perturbed)} runs on data changed in the last bit, "
            f"{len(perturbed) - len(tasks)} finished before",
            highlight=False,
        )
    if not left and not tasks:
        return 0
    waiting = {run.name for run in left}
    runs = directory / RUN_DIRECTORY
    try:
        with workers:
            text = "Preparing kernels, data and the minimum of each loss (cached for next time) ..."
            with console.status(text):
                minima = find_minima(workers, left, data_dir) if left else {}
            runs.mkdir(parents=True, exist_ok=True)
            done = [p.run for p in plan if p.run.name not in waiting]
            spent = add_bytes(*(read_summary(runs / run.name).get("total_bytes") for run in done))
            failures = {}
            if left:
                with Overview(console, left, len(plan), spent) as overview:
                    failures = run_all(workers, left, minima, runs, data_dir, overview.show)
            if tasks:
                with console.status("Logistic runs on data changed in the last bit ..."):
                    failures |= run_perturbed(workers, tasks, directory)
    except runner.Interrupted:
        raise runner.Interrupted(
            f"stopped with {len(plan) - len(still_to_do(plan, directory))} of {len(plan)} runs "
            "finished; everything is saved, and the same command goes on"
        ) from None
    if failures:
        print(
            f"aqg: error: {len(failures)} of {len(plan) + len(perturbed)} runs failed: "
            f"{', '.join(failures)}; the same command tries them again",
            file=sys.stderr,
        )
    return len(failures)


def show_results(console: Console, results: Results) -> None:
    """Print every table, and what was shortened."""
    from aqg.reproduce.tables import all_tables

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
    from rich import box
    from rich import table as rich_table

    shown = rich_table.Table(
        *(name.replace("`", "") for name in table.header),
        box=box.SIMPLE_HEAD,
        header_style="bold",
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for row in table.rows:
        shown.add_row(*(cell.replace("`", "") for cell in row))
    console.print(f"\n[bold]{table.title.replace('`', '')}[/bold]")
    console.print(table.note.replace("`", ""), style="dim", highlight=False)
    console.print(shown)
