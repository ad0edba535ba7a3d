"""``aqg report``: read run directories, write one HTML file and, if asked, pictures and tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Runs, comparisons or sweeps; any number, mixed."),
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the plots here, as PNG.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write summary.csv and curves.csv here."),
    ] = None,
) -> None:
    """Make one HTML file to look at runs with: it needs no network and opens from disk.

    Runs that differ only in the seed are shown as one curve with a band. Unfinished runs are shown
    as far as they came.
    """
    from rich.console import Console

    from aqg.report.write import Outputs, check_outputs, write_report
    from aqg.runs.table import format_bytes

    outputs = Outputs(out, png, csv)
    check_outputs(outputs)
    begun = time.perf_counter()
    console = Console()
    with console.status("Reading runs ..."):
        written = write_report(directories, outputs)
    seconds = time.perf_counter() - begun
    for path in written.files:
        size = format_bytes(path.stat().st_size)
        console.print(f"{path} ({size})", highlight=False, soft_wrap=True)
    runs = "1 run" if written.num_runs == 1 else f"{written.num_runs} runs"
    console.print(f"{runs} in {seconds:.1f} s", style="dim", highlight=False)
