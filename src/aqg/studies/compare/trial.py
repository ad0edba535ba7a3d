"""One trial: what is run of a recipe on a task, where it is kept, and what came of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from aqg.core.downlink import AUTO
from aqg.runs.cost import add_bytes
from aqg.runs.loop import slug

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aqg.runs.config import RunConfig
    from aqg.runs.stopping import Ending
    from aqg.studies.compare.tasks import Task

CEILING = 10
"""Costs of so many times those of the best recipe of a task are of no interest."""
SELF_SETTING = 0.0
"""In place of a multiple of the step: one that the server sets itself."""
FORMER_STEP = -1.0
"""The same with a rule of earlier versions: such runs are kept and ranked, and never made anew."""
_OLDER_ENDINGS = {"too slow": "hopeless"}


@dataclass(frozen=True)
class Setting:
    """A recipe with its parameters and step size fixed.

    Attributes:
        spec: the recipe with its options, such as ``"stc:keep=0.001"``.
        bits: ``b_max``.
        multiplier: of the task's step size; `SELF_SETTING` where the server sets it.
        downlink: how clients receive the model; ``"auto"`` is what the comparison says.

    """

    spec: str
    bits: int = 4
    multiplier: float = 1.0
    downlink: str = AUTO

    def __str__(self) -> str:
        text = self.spec if self.bits == 4 else f"{self.spec}, {self.bits} bits"
        if self.downlink != AUTO:
            text += f", {self.downlink}"
        if self.multiplier == SELF_SETTING:
            return f"{text}, step of its own"
        if self.multiplier == FORMER_STEP:
            return f"{text}, former adaptive step"
        return text if self.multiplier == 1 else f"{text}, step ×{self.multiplier:g}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields; a downlink that is not chosen is left out."""
        row = asdict(self)
        if self.downlink == AUTO:
            del row["downlink"]
        return row

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Setting:
        """Read what `to_json` wrote, among other fields."""
        downlink = row.get("downlink", AUTO)
        return Setting(row["spec"], row["bits"], row["multiplier"], downlink)


@dataclass(frozen=True)
class Trial:
    """What is run: a task by name, a recipe by name, its setting and the seed."""

    task: str
    recipe: str
    setting: Setting
    seed: int

    @property
    def directory(self) -> str:
        """Where the run is kept: ``TASK/RECIPE/SETTING-seed-N``."""
        setting = str(self.setting).replace("×", "").replace(", ", "-").replace(" ", "-")
        return "/".join(map(safe, (self.task, self.recipe, f"{setting}-seed-{self.seed}")))

    def config(self, task: Task, device: str, downlink: str) -> RunConfig:
        """Return the config of the run."""
        return replace(
            task.config,
            recipe=self.setting.spec,
            bits=self.setting.bits,
            alpha=task.config.alpha * self.setting.multiplier,
            seed=self.seed,
            downlink=downlink if self.setting.downlink == AUTO else self.setting.downlink,
            device=device if task.uses_device else "cpu",
        )


def safe(text: str) -> str:
    """Make a name that can be read and that a file system takes.

    >>> safe("heart.py:problem:folder=a/b")
    'heart.py_problem_folder-a%2Fb'
    """
    return slug(quote(text, safe=":=+"))


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        trial: what was run.
        ending: as in `aqg.runs.stopping`; ``"rounds"``: the task's rounds were over. A trial that
            is too expensive is ``"costlier"`` than another setting of the same recipe that reached
            the target, or ``"beyond"`` the `CEILING`.
        rounds: until the target was reached; else until the end.
        uploads: in these rounds.
        upload_bytes: in these rounds, what all clients sent.
        value: the loss, residual or accuracy at the end; None where it is no number.
        seconds: the whole run took.
        download_bytes: in these rounds, what all clients received; None where it is not on record.

    """

    trial: Trial
    ending: Ending
    rounds: int
    uploads: int
    upload_bytes: int
    value: float | None
    seconds: float
    download_bytes: int | None = None

    @property
    def is_reached(self) -> bool:
        """Whether the target was reached."""
        return self.ending == "reached"

    @property
    def total_bytes(self) -> int | None:
        """What the clients sent and received; None where the latter is not on record."""
        return add_bytes(self.upload_bytes, self.download_bytes)

    @property
    def cost(self) -> int:
        """The bytes that count: those of both directions or, without downloads, the uploads."""
        return self.upload_bytes if self.total_bytes is None else self.total_bytes

    def to_json(self) -> dict[str, Any]:
        """Return one flat object."""
        row = asdict(self)
        trial = row.pop("trial")
        del trial["setting"]
        return {**trial, **self.trial.setting.to_json(), **row}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Outcome:
        """Read what `to_json` wrote, in this version or an earlier one."""
        trial = Trial(row["task"], row["recipe"], Setting.from_json(row), row["seed"])
        names = ("rounds", "uploads", "upload_bytes", "value", "seconds")
        found = {name: row[name] for name in names}
        ending = _OLDER_ENDINGS.get(row["ending"], row["ending"])
        return Outcome(trial, ending, download_bytes=row.get("download_bytes"), **found)

    @staticmethod
    def of_run(trial: Trial, summary: Mapping[str, Any], seconds: float = 0.0) -> Outcome:
        """Return what a finished run says of itself in its ``summary.json``."""
        row = summary["outcome"]
        names = ("ending", "rounds", "uploads", "upload_bytes", "value", "download_bytes")
        return Outcome(trial, seconds=seconds, **{name: row[name] for name in names})
