"""Progress bars and tables: of one comparison, and of a study with many runs."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Self, TypeAlias

import rich.progress
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress, TaskID, TextColumn
from rich.table import Column

from aqg.objectives.metrics import Metric, named_metric
from aqg.runs import loop
from aqg.runs.cost import BYTES
from aqg.runs.directory import read_metrics
from aqg.runs.executor import Done, Event, Failed, Reported, Started, Stopping
from aqg.runs.plan import Job, StudyPlan
from aqg.runs.table import Table, format_bytes

Row: TypeAlias = Mapping[str, Any]
"""A run's results (`aqg.runs.stopping.summarize`)."""
DIRECTIONS = ("up", "down", "total")


def say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def widen(console: Console, width: int) -> None:
    """Let a file have lines of at least this width: it has no edge to wrap at."""
    if not console.is_terminal:
        console.width = max(console.width, width)


def both_directions(cost: Row) -> str:
    """Write what was sent and received, in a few letters.

    >>> both_directions({"upload_bytes": 812, "download_bytes": 48_200})
    '812 B up, 48.2 kB down'
    """
    sizes = (format_bytes(cost[name]) for name in BYTES[:2])
    return "{} up, {} down".format(*sizes)


def _bar(console: Console, *columns: rich.progress.ProgressColumn, width: int = 30) -> Progress:
    """Return bars with a name, how many of how many, and further columns."""
    no_wrap = Column(no_wrap=True, max_width=60)
    name = TextColumn("{task.description}", style="bold", table_column=no_wrap)
    bar, count = rich.progress.BarColumn(width), rich.progress.MofNCompleteColumn()
    return Progress(name, bar, count, *columns, console=console)


_SIZE = TextColumn("{task.fields[size]}", style="cyan")
_LOSS = TextColumn("loss {task.fields[loss]}")


def _state(progress: loop.Progress) -> dict[str, Any]:
    return {
        "completed": progress.cost.rounds,
        "loss": "-" if math.isnan(progress.loss) else f"{progress.loss:.4f}",
        "size": both_directions(progress.cost.to_json()),
    }


@contextmanager
def progress_bars(
    console: Console, names: Sequence[str], num_rounds: int
) -> Iterator[Callable[[str], Callable[[loop.Progress], None]]]:
    uploads = TextColumn("{task.fields[uploads]} uploads")
    left = rich.progress.TimeRemainingColumn(elapsed_when_finished=True)
    with _bar(console, _LOSS, uploads, _SIZE, left) as bars:
        width = max(len(name) for name in names)
        empty: dict[str, Any] = {"loss": "-", "uploads": 0, "size": "", "start": False}
        tasks = {n: bars.add_task(n.ljust(width), total=num_rounds, **empty) for n in names}

        def watcher(name: str) -> Callable[[loop.Progress], None]:
            task = tasks[name]
            bars.start_task(task)
            return lambda now: bars.update(task, uploads=now.cost.uploads, **_state(now))

        yield watcher


def result_table(results: Sequence[Row], width: int | None = None, *left_out: str) -> Table:
    """Return one row per run, with savings of all bytes against `BASELINES` where present.

    Where all columns do not fit into ``width`` characters, bits per parameter are left out.
    """
    baselines = [row for row in results if row["recipe"] in BASELINES]
    columns = columns_of(results, *left_out)
    versus = [f"vs {baseline['recipe']}" for baseline in baselines]
    rows = []
    for row in results:
        cells = [column.cell(row) for column in columns]
        if row["diverged"]:
            cells[0] = "diverged"
        savings = (_saving(row["total_bytes"], baseline["total_bytes"]) for baseline in baselines)
        rows.append((row["recipe"], *cells, *savings))
    header = ("recipe", *(column.title for column in columns), *versus)
    table = Table("runs", "Runs", DIRECTIONS_NOTE, header, tuple(rows), num_labels=1)
    if width is not None and Console(width=1000).measure(table.to_terminal()).maximum > width:
        return result_table(results, None, "bits/param")
    return table


class Shown(NamedTuple):
    title: str
    value: Callable[[Row], float | None]
    write: Callable[[float], str]

    def cell(self, row: Row) -> str:
        value = self.value(row)
        return "-" if value is None else self.write(value)


def columns_of(rows: Sequence[Row], *left_out: str) -> list[Shown]:
    """Return what tables show of runs, but for columns with these titles: the loss comes first."""
    columns = [
        Shown("final loss", itemgetter("final_loss"), "{:.6f}".format),
        *(Shown(metric_title(m), partial(_metric_of, m.name), m.format) for m in measured(rows)),
        Shown("uploads", itemgetter("uploads"), "{:,.0f}".format),
        Shown("bits/param", itemgetter("bits_per_param"), "{:,.0f}".format),
        *(Shown(t, itemgetter(name), _size) for t, name in zip(DIRECTIONS, BYTES, strict=True)),
    ]
    if any("simulated_seconds" in row for row in rows):
        columns.append(Shown("time", lambda row: row.get("simulated_seconds"), "{:,.1f} s".format))
    return [column for column in columns if column.title not in left_out]


def _metric_of(name: str, row: Row) -> float | None:
    return read_metrics(row).get(name)


def _size(mean: float) -> str:
    return format_bytes(round(mean))


def headline(rows: Sequence[Row]) -> str | None:
    """Say what the first recipe saves in each direction, and at which accuracy."""
    plain = next((row for row in rows if row["recipe"] in UNCOMPRESSED), None)
    ours = rows[0]
    if plain is None or plain is ours or ours["diverged"] or plain["diverged"]:
        return None
    if not (ours["upload_bytes"] and ours["download_bytes"]):
        return None
    up, down = (plain[name] / ours[name] for name in BYTES[:2])
    found, known = read_metrics(ours), read_metrics(plain)
    name = plain["recipe"]
    quality = [
        f"{metric_title(m)} {m.format(found[m.name])} ({name}: {m.format(known[m.name])})"
        for m in measured([ours])
        if m.name in known
    ] or [f"loss {ours['final_loss']:.4f} ({name}: {plain['final_loss']:.4f})"]
    rounds = f"{ours['rounds']:,} rounds"
    if ours["rounds"] != plain["rounds"]:
        rounds += f" ({name}: {plain['rounds']:,})"
    return (
        f"{ours['recipe']} after {rounds}: {', '.join(quality)}; "
        f"{up:,.3g} times fewer bytes up, {down:,.3g} times fewer down."
    )


def measured(rows: Iterable[Row]) -> list[Metric]:
    """Return the metrics that runs have, in order; none is shown that no run has."""
    names = dict.fromkeys(name for row in rows for name in read_metrics(row))
    return [named_metric(name) for name in names]


def metric_title(metric: Metric) -> str:
    return "test acc" if metric.name == "accuracy" else f"test {metric.name.replace('_', ' ')}"


def target_table(results: Sequence[Row]) -> Table:
    """Return what it cost to come within the target of the minimum, and stay there."""
    _, *columns = columns_of(results, *map(metric_title, measured(results)))
    rows = []
    for row in results:
        cost, residual = row["target"], row["residual"]
        spent = ["not reached", *[""] * len(columns)]
        if cost["reached_round"] is not None:
            spent = [f"{cost['reached_round']:,}", *(column.cell(cost) for column in columns)]
        known = residual is not None and not row["diverged"]
        rows.append((row["recipe"], *spent, f"{residual:.1e}" if known else "-"))
    header = ("recipe", "rounds", *(column.title for column in columns), "final residual")
    return Table("target", "Cost to the target", DIRECTIONS_NOTE, header, tuple(rows), num_labels=1)


def sweep_table(varying: Sequence[str], rows: Sequence[Row]) -> Table:
    """Return one row per combination of the settings that vary, but the seed: means and ranges."""
    names = [name for name in varying if name != "seed"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr([row["settings"][name] for name in names]), []).append(row)
    columns = columns_of(rows, "bits/param", "time")
    header = [*names, "runs", *(column.title for column in columns)]
    with_target = any("target" in row for row in rows)
    if with_target:
        header.append("total to target")
    shown = []
    for group in groups.values():
        cells = [*(str(group[0]["settings"][name]) for name in names), *_means(group, columns)]
        shown.append((*cells, _target_cost(group)) if with_target else tuple(cells))
    note = "Means over seeds, and smallest..largest."
    return Table("sweep", "Sweep", note, tuple(header), tuple(shown), num_labels=len(names))


def _means(group: Sequence[Row], columns: Sequence[Shown]) -> list[str]:
    done = [row for row in group if "error" not in row]
    if not done:
        return [f"0 of {len(group)}", "failed", *["-"] * (len(columns) - 1)]
    num_diverged = sum(row["diverged"] for row in done)
    count = str(len(group)) if len(done) == len(group) else f"{len(done)} of {len(group)}"
    cells = [_spread([column.value(row) for row in done], column.write) for column in columns]
    if num_diverged:
        cells[0] = f"diverged<br>({num_diverged} of {len(done)})"
    return [count, *cells]


def _target_cost(group: Sequence[Row]) -> str:
    targets = [row["target"] for row in group if "target" in row]
    reached = [t.get("total_bytes") for t in targets if t["upload_bytes"] is not None]
    if not reached:
        return "not reached" if targets else "-"
    text = _spread(reached, _size)
    some = f"<br>{len(reached)} of {len(targets)} reached" if len(reached) < len(targets) else ""
    return text + some


def _spread(values: Sequence[float | None], write: Callable[[float], str]) -> str:
    """Write the mean and, where values differ, the smallest and the largest."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = write(sum(known) / len(known))
    low, high = write(min(known)), write(max(known))
    return mean if low == high else f"{mean}<br>{low}..{high}"


UNCOMPRESSED = ("fedavg", "gd")
BASELINES = (*UNCOMPRESSED, "laq")
"""Recipes that savings are measured against where a comparison has them."""
DIRECTIONS_NOTE = "up, down: bytes that all clients sent and received; total: both."


def _saving(size: int, baseline: int) -> str:
    if size == baseline or size == 0:
        return "-"
    ratio = baseline / size
    return f"{ratio:.3g}×" if ratio >= 1 else f"{ratio:.1g}×"


class Overview:
    """Shows what happens to the jobs of a plan, and how many are left, at most.

    On a terminal a bar, and a line per run under way; elsewhere a line per run that has ended.
    """

    def __init__(self, console: Console, plan: StudyPlan[Any], name: str) -> None:
        self._console, self._plan = console, plan
        self._num_ended = 0
        self._started = time.monotonic()
        self._said: set[str] = set()
        self._bytes: dict[int, int] = {}
        self._lines: dict[int, TaskID] = {}
        times = rich.progress.TimeElapsedColumn(), rich.progress.TimeRemainingColumn()
        self._bar = _bar(console, TextColumn("runs"), _SIZE, *times)
        total = plan.num_before + plan.most_left()
        self._study = self._bar.add_task(name, total=total, completed=plan.num_before, size="")
        self._count_bytes({})
        self._run_lines = _bar(console, _LOSS, _SIZE, width=20)
        self._live = Live(Group(self._bar, self._run_lines), console=console)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, job: Job | None, event: Event) -> None:
        match event:
            case Started(index) if job is not None:
                add = self._run_lines.add_task
                self._lines[index] = add(job.name, total=job.config.rounds, loss="-", size="-")
            case Reported(_, str(text)):
                if text not in self._said:
                    self._said.add(text)
                    say(self._console, text)
            case Reported(index, progress):
                self._run_lines.update(self._lines[index], **_state(progress))
                self._count_bytes({index: progress.cost.total_bytes})
            case Done(index, summary) if job is not None:
                self._count_bytes({index: summary["total_bytes"]})
                self._end(index, f"{job.name}: {_in_one_line(summary)}")
            case Failed(index, error) if job is not None:
                self._end(index, f"{job.name}: failed: {error}", failed=True)
            case Stopping():
                text = "Stopping after the current rounds; Ctrl-C once more stops at once."
                say(self._console, text)

    def _count_bytes(self, found: Mapping[int, int]) -> None:
        self._bytes |= found
        total = self._plan.bytes_before + sum(self._bytes.values())
        self._bar.update(self._study, size=f"{format_bytes(total)} up and down")

    def _end(self, index: int, text: str, failed: bool = False) -> None:
        self._num_ended += 1
        num_left = self._plan.most_left()
        done = self._plan.num_before + self._num_ended
        self._bar.update(self._study, completed=done, total=done + num_left)
        self._run_lines.remove_task(self._lines.pop(index))
        if failed or not self._console.is_terminal:
            elapsed = time.monotonic() - self._started
            left = elapsed / self._num_ended * num_left
            so_far, to_go = (timedelta(seconds=round(seconds)) for seconds in (elapsed, left))
            say(self._console, f"[{done}/{done + num_left}, {so_far}, {to_go} left] {text}")


def _in_one_line(summary: Row) -> str:
    if (outcome := summary.get("outcome")) is not None:
        value = "" if outcome["value"] is None else f" at {outcome['value']:.4g}"
        how = f"{outcome['ending']}{value}, {outcome['rounds']} rounds"
        return f"{how}, {both_directions(outcome)}"
    loss = "diverged" if summary["diverged"] else f"loss {summary['final_loss']:.6f}"
    return f"{loss}, {summary['uploads']:,} uploads, {both_directions(summary)}"
