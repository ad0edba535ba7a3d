"""The HTML file: template, style, scripts and data in one, with no need for a network."""

from __future__ import annotations

import html
from datetime import UTC, datetime
from importlib import resources
from string import Template
from typing import TYPE_CHECKING

from aqg.report.document import make_document
from aqg.report.packing import Packer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.report.frontier import Panel
    from aqg.report.groups import Comparison

_STYLE = "style.css"
_SCRIPTS = ("data.js", "charts.js", "activity.js", "frontier.js", "tables.js", "report.js")


def make_page(
    comparison: Comparison, studies: Sequence[Panel] = (), created: datetime | None = None
) -> str:
    """Return the report as one HTML text; ``created`` is now unless given.

    ``studies`` are the panels of comparisons that were measured already.

    Whatever comes from run directories reaches the page as packed data, which the scripts show as
    text only, or escaped.
    """
    packer = Packer()
    document = make_document(comparison, packer, studies)
    created = created or datetime.now(UTC)
    document["created"] = created.strftime("%Y-%m-%d %H:%M UTC")
    return Template(_read("template.html")).substitute(
        title=html.escape(document["title"]),
        style=_read(_STYLE),
        scripts="\n".join(_read(name) for name in _SCRIPTS),
        data=packer.pack(document),
    )


def _read(name: str) -> str:
    return resources.files("aqg.report").joinpath(name).read_text(encoding="utf-8")
