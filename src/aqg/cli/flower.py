"""``aqg flower``: what the recipes cost on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from aqg.flower.demo import Demo, NodeBytes

flower_app = typer.Typer(name="flower", help="Run on Flower.", no_args_is_help=True)


@flower_app.callback()
def _root() -> None:
    """Keep ``demo`` a command of its own, although it is the only one."""


@flower_app.command()
def demo(
    nodes: Annotated[int, typer.Option(help="How many SuperNodes.")] = 3,
    rounds: Annotated[int, typer.Option(help="How many rounds.")] = 20,
    recipe: Annotated[str, typer.Option(help="See `aqg recipes`.")] = "auto",
    seed: Annotated[int, typer.Option(help="Makes a run repeatable.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Directory for results (new or empty).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train on digits in Flower's own simulation on this machine, and count every byte.

    All processes end with the command, also on Ctrl-C.
    """
    import json
    import sys
    from dataclasses import asdict

    from rich.console import Console

    _require_flower()
    from aqg.flower.demo import Demo
    from aqg.runs.directory import output_directory

    console = Console(stderr=as_json)
    with output_directory(out, "flower") as directory:
        running = Demo(directory=directory, nodes=nodes, rounds=rounds, recipe=recipe, seed=seed)
        table = running.byte_table(_train(console, running))
        summary = running.summary()
    if as_json:
        rows = [asdict(row) for row in table]
        result = {**summary, "nodes": rows, "directory": str(directory)}
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return
    from aqg.cli.display import measured, metric_title
    from aqg.runs.directory import read_metrics

    found = read_metrics(summary)
    metrics = [f"{metric_title(m)} {m.format(found[m.name])}" for m in measured([found])]
    console.print(
        f"\nLoss {summary['final_loss']:.4f} after {rounds} rounds, {', '.join(metrics)}."
    )
    console.print(_byte_table(table))
    console.print(
        "up, down: frames and models, and both (total); as float32: what plain gradients and "
        "models would take in total.",
        style="dim",
    )
    console.print(f"Results: {running.run_directory}", highlight=False, soft_wrap=True)


def _require_flower() -> None:
    from importlib.util import find_spec

    from aqg.errors import ConfigError

    if find_spec("flwr") is None:
        raise ConfigError("aqg flower needs the package flwr: pip install 'aqg[flower,sim]'")


def _train(console: Console, running: Demo) -> list[dict[str, Any]]:
    """Show the rounds as they go, and return them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from aqg.runs.table import format_bytes

    sent = received = 0
    with Progress(
        TextColumn("{task.description}", style="bold"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        state = f"starting Flower's simulation of {running.nodes} nodes"
        bar = bars.add_task(running.recipe, total=running.rounds, state=state)

        def show(line: dict[str, Any]) -> None:
            nonlocal sent, received
            sent += line["upload_bytes"]
            received += line["download_bytes"]
            loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
            state = f"loss {loss}  {format_bytes(sent)} up, {format_bytes(received)} down  "
            state += f"{line['round_seconds']:.1f} s/round"
            bars.update(bar, completed=line["round"], state=state)

        return running.run(show)


def _byte_table(nodes: list[NodeBytes]) -> Table:
    from rich import box
    from rich.table import Table

    from aqg.runs.table import format_bytes

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("node", style="bold")
    for column in ("uploads", "up", "down", "total", "as float32", "smaller"):
        table.add_column(column, justify="right", no_wrap=True)
    cells = [
        (
            str(node.node),
            node.uploads,
            node.upload_bytes,
            node.download_bytes,
            node.total_bytes,
            node.plain_bytes,
        )
        for node in nodes
    ]
    _, *counts = zip(*cells, strict=True)
    sums = [sum(count) for count in counts]
    for name, uploads, *sizes in [*cells, ("all", *sums)]:
        *_, total, plain = sizes
        ratio = f"{plain / total:.3g}×" if total else "-"
        table.add_row(name, str(uploads), *map(format_bytes, sizes), ratio)
    return table
