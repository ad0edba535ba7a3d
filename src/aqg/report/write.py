"""From directories to files: the report, and the pictures and tables on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aqg.errors import RunError
from aqg.report.frontier import find_studies, of_study
from aqg.report.groups import compare
from aqg.report.page import make_page
from aqg.report.results import clients_csv, curves_csv, summary_csv
from aqg.report.runs import holds_runs, read_runs
from aqg.runs.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Outputs:
    """Where things go: the HTML file and, if wanted, directories for PNG and CSV files."""

    html: Path
    png: Path | None = None
    csv: Path | None = None


@dataclass(frozen=True)
class Written:
    """What was written, and from how many runs."""

    files: tuple[Path, ...]
    num_runs: int


def check_outputs(outputs: Outputs) -> None:
    """Refuse places that cannot be written to, before anything is read."""
    if outputs.html.is_dir():
        raise RunError(
            f"{str(outputs.html)!r} is a directory; name a file, as in --out report.html"
        )
    if not outputs.html.parent.is_dir():
        raise RunError(f"directory {str(outputs.html.parent)!r} of --out does not exist")
    for directory in (outputs.png, outputs.csv):
        if directory is None:
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"output directory {str(directory)!r} cannot be made: {error.strerror}"
            ) from None


def write_report(directories: Sequence[Path], outputs: Outputs) -> Written:
    """Read all runs in ``directories`` and write what is asked for."""
    studies = find_studies(directories)
    # What was published of a comparison has no runs beside it.
    with_runs = [path for path in directories if path not in studies or holds_runs(path)]
    comparison = compare(read_runs(with_runs))
    panels = [panel for directory in studies for panel in of_study(directory)]
    contents = {outputs.html: make_page(comparison, panels).encode()}
    if outputs.png is not None:
        from aqg.report.pictures import draw_pictures  # needs matplotlib

        for name, picture in draw_pictures(comparison).items():
            contents[outputs.png / name] = picture
    if outputs.csv is not None:
        contents[outputs.csv / "summary.csv"] = summary_csv(comparison.runs).encode()
        contents[outputs.csv / "curves.csv"] = curves_csv(comparison.runs).encode()
        contents[outputs.csv / "clients.csv"] = clients_csv(comparison.runs).encode()
    for path, content in contents.items():
        write_atomically(path, content)
    return Written(tuple(contents), len(comparison.runs))
