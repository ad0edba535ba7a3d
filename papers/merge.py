"""Bring results of several machines together: ``python -m papers.mao2022 --beside DIR``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from aqg.errors import RunError
from aqg.studies.paper.outcomes import (
    ROUNDING_SECTION,
    Results,
    count_runs,
    read_results,
    write_results,
)
from aqg.studies.paper.plan import FULL, make_plan


def keep_beside(directory: Path, other: Path) -> None:
    """Keep with the results in ``directory`` what those in ``other`` have besides.

    These are seeds that are missing here, each once all of its runs are there, and the logistic
    runs of another kind of processor.
    """
    here, there = read_results(directory), read_results(other)
    for name in FULL.keys() - {"notes"}:
        if here.about[name] != there.about[name]:
            raise RunError(
                f"the runs in {str(directory)!r} and {str(other)!r} are not of the same plan: "
                f"{name} is {here.about[name]} and {there.about[name]}"
            )
    merged = _with_other_machine(_with_missing(here, there), there)
    if merged == here:
        raise RunError(
            f"{str(other)!r} has nothing that {str(directory)!r} lacks: no missing seed with all "
            "of its runs, and no logistic runs of another kind of processor"
        )
    write_results(directory, merged)


def _with_missing(here: Results, there: Results) -> Results:
    """Add seeds that are missing, so that every cell of a table keeps the same seeds.

    Logistic runs are never mixed: their counts depend on the machine.
    """
    plan = [run for run in make_plan(here.about) if run.section != ROUNDING_SECTION]
    new = {o.name: o for o in there.outcomes}
    if here.select(section="logistic"):
        new = {name: o for name, o in new.items() if o.section != "logistic"}
    known = {**new, **{o.name: o for o in here.outcomes}}
    old = {o.name for o in here.outcomes}
    partial = {(run.section, run.config.seed) for run in plan if run.name not in known}
    outcomes = tuple(
        known[run.name]
        for run in plan
        if run.name in old or (run.section, run.config.seed) not in partial
    )
    if len(outcomes) == len(old):
        return here
    curves = {
        o.name: (here if o.name in old else there).curves[o.name]
        for o in outcomes
        if o.name in here.curves or o.name in there.curves
    }
    about = {**here.about, **count_runs(plan, outcomes)}
    about["versions"] = {**there.about.get("versions", {}), **here.about.get("versions", {})}
    return replace(here, outcomes=outcomes, curves=curves, about=about)


def _with_other_machine(here: Results, there: Results) -> Results:
    """Add logistic runs of another kind of processor, beside those that are here."""
    runs = tuple(there.select(section="logistic"))
    machines = {o.machine for o in runs}
    if not machines or machines == {o.machine for o in here.select(section="logistic")}:
        return here
    if len(machines) > 1:
        found = ", ".join(sorted(machines))
        raise RunError(f"logistic runs of {found} cannot be told apart; one machine is needed")
    (machine,) = machines
    made = dict(here.about.get("versions", {}))
    place = f"logistic: {machine}"
    if place in there.about.get("versions", {}):
        made[place] = there.about["versions"][place]
    return replace(
        here, elsewhere={**here.elsewhere, machine: runs}, about={**here.about, "versions": made}
    )
