"""The report's plots as PNG files, drawn with matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aqg.report import curves
from aqg.report.runs import COLORS, Comparison, Group, Run, widths_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 2), (6, 2, 1, 2), (9, 3), (3, 2))
_AXES = {"rounds": "rounds", "uploads": "uploads", "total_bytes": "bytes uploaded and downloaded"}
_MAX_PANELS = 12
_BINS = 120
_COLUMNS = 400
_ROWS = 200
_OTHER_PICTURES = ("loss", "widths", "clients")
_AWAY = "#f6c993"
_SKIPPED = "#f4f2ed"


def draw_pictures(comparison: Comparison) -> dict[str, bytes]:
    """Return PNG files by name: curves of loss and metrics, and uploads of the first groups."""
    pictures = {"loss.png": _draw_curves(comparison, [_loss_of(comparison)])}
    for name in curves.metric_names(comparison.runs):
        file = f"{name}.png" if name not in _OTHER_PICTURES else f"test_{name}.png"
        pictures[file] = _draw_curves(comparison, [name])
    shown = [group for group in comparison.groups if group.runs[0].widths.size][:_MAX_PANELS]
    if shown:
        colors = _width_colors(widths_of(group.runs[0] for group in shown))
        pictures["widths.png"] = _draw_groups(shown, 2.2, colors, _draw_widths, {})
        quiet = {"skipped": _SKIPPED, "dropped out": _AWAY}
        pictures["clients.png"] = _draw_groups(shown, 2.4, colors, _draw_clients, quiet)
    return pictures


def draw_comparison(comparison: Comparison, title: str) -> bytes:
    """Draw loss and metrics against rounds, uploads and bytes in one picture."""
    metrics = [_loss_of(comparison), *curves.metric_names(comparison.runs)]
    return _draw_curves(comparison, metrics, title)


def _loss_of(comparison: Comparison) -> str:
    return "residual" if all(run.minimum is not None for run in comparison.runs) else "loss"


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _draw_curves(comparison: Comparison, metrics: Sequence[str], title: str = "") -> bytes:
    legend = 0.4 + 0.2 * math.ceil(len(comparison.groups) / 4)
    columns = dict(_AXES)
    if all(curves.SECONDS in run.extras for run in comparison.runs):
        columns[curves.SECONDS] = "simulated seconds"
    figure = new_figure(13 * len(columns) / len(_AXES), 4 * len(metrics) + legend)
    rows = figure.subplots(len(metrics), len(columns), sharey="row", squeeze=False)
    names = {"residual": "loss − minimum", "loss": "loss"}
    for axes, metric in zip(rows, metrics, strict=True):
        for panel, (axis, label) in zip(axes, columns.items(), strict=True):
            for group in comparison.groups:
                _draw_group(panel, group, axis, metric)
            panel.set_xlabel(label)
            has_points = any(len(line.get_xdata()) for line in panel.lines)
            # Without points, a logarithm has no limits.
            if axis in ("uploads", "total_bytes") and has_points:
                panel.set_xscale("log")
            if metric in curves.LOSSES and has_points:
                panel.set_yscale("log")
            tidy(panel)
        axes[0].set_ylabel(names.get(metric, curves.test_title(metric)))
    if title:
        figure.suptitle(title, fontsize=11)
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return png(figure)


def _draw_group(panel: Axes, group: Group, axis: str, metric: str) -> None:
    band = curves.combine([curves.run_points(run, axis, metric) for run in group.runs])
    if band is None:
        panel.plot([], [], label=group.label)
        return
    seen = np.ones(len(band.x), bool) if axis in ("rounds", curves.SECONDS) else band.x > 0
    if metric in curves.LOSSES:
        seen &= band.median > 0
    x, median = band.x[seen], band.median[seen]
    dashes = _DASHES[group.dash % len(_DASHES)]
    (line,) = panel.plot(x, median, color=COLORS[group.color], linewidth=1.7, label=group.label)
    if dashes:
        line.set_dashes(dashes)
    if len(x):
        panel.plot(x[-1], median[-1], "o", color=COLORS[group.color], markersize=4)
    if len(group.runs) > 1:
        low = band.low[seen]
        if metric in curves.LOSSES:  # a logarithmic axis has no zero
            low = np.maximum(low, np.finfo(float).tiny)
        panel.fill_between(x, low, band.high[seen], color=COLORS[group.color], alpha=0.15, lw=0)


def tidy(panel: Axes) -> None:
    panel.grid(True, which="major", color="#e6e2da", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def grid(count: int, width: float, height: float, margin: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels of such a size, up to three in a row."""
    columns = max(1, min(count, 3))
    rows = max(1, math.ceil(count / columns))
    figure = new_figure(width * columns + margin, height * rows + 0.5)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels[:count]


def _draw_groups(
    groups: Sequence[Group],
    height: float,
    colors: dict[int, str],
    draw: Callable[[Axes, Run, dict[int, str]], None],
    more: dict[str, str],
) -> bytes:
    """Draw the first run of each group; colors are by width, and ``more`` by name."""
    from matplotlib.patches import Patch

    figure, panels = grid(len(groups), 4.4, height, 1)
    for panel, group in zip(panels, groups, strict=True):
        panel.set_title(group.label, fontsize=9, loc="left")
        panel.set_xlabel("round", fontsize=8)
        panel.tick_params(labelsize=8)
        draw(panel, group.runs[0], colors)
    names = {"1 bit" if width == 1 else f"{width} bits": c for width, c in colors.items()} | more
    patches = [Patch(color=color, label=name) for name, color in names.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    return png(figure)


def _draw_widths(panel: Axes, run: Run, colors: dict[int, str]) -> None:
    histogram = curves.count_widths(run.widths, _BINS)
    base = np.zeros(len(histogram.edges) - 1)
    edges = histogram.edges + run.rounds[0]
    for width, counts in zip(histogram.widths, histogram.counts, strict=True):
        top = base + counts / np.diff(histogram.edges)
        panel.stairs(top, edges, baseline=base, fill=True, color=colors[width])
        base = top
    panel.set_ylabel("uploads per round", fontsize=8)
    tidy(panel)


def _draw_clients(panel: Axes, run: Run, colors: dict[int, str]) -> None:
    """Paint clients × bins of rounds: color for the bits of an upload, strength for how often."""
    from matplotlib.colors import to_rgb

    activity = curves.watch_clients(run.widths, _COLUMNS, _ROWS)
    chances = np.diff(activity.clients)[:, None] * np.diff(activity.edges)[None, :]
    widths = np.array(list(colors), np.float64)
    shades = np.array([to_rgb(color) for color in colors.values()])
    mean_bits = activity.bits / np.maximum(activity.uploads, 1)
    color = np.stack(
        [np.interp(mean_bits, widths, shades[:, channel]) for channel in range(3)], axis=-1
    )
    away_share = (activity.away / chances)[..., None]
    quiet = (1 - away_share) * np.array(to_rgb(_SKIPPED)) + away_share * np.array(to_rgb(_AWAY))
    strength = np.sqrt(activity.uploads / np.maximum(chances - activity.away, 1))
    strength = np.where(activity.uploads > 0, np.clip(strength, 0.22, 1), 0)[..., None]
    image = quiet * (1 - strength) + color * strength
    extent = (run.rounds[0], run.rounds[-1] + 1, run.widths.shape[1] - 0.5, -0.5)
    panel.imshow(image, aspect="auto", extent=extent, interpolation="nearest")
    panel.set_ylabel("client", fontsize=8)


def _width_colors(widths: Sequence[int]) -> dict[int, str]:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    stops = ["#bfe5cf", "#56b9b0", "#2a7fb8", "#3c479f", "#2b1158"]
    ramp = LinearSegmentedColormap.from_list("bits", stops)
    last = max(len(widths) - 1, 1)
    places = [0.6] if len(widths) == 1 else [rank / last for rank in range(len(widths))]
    return {width: to_hex(ramp(place)) for width, place in zip(widths, places, strict=True)}
