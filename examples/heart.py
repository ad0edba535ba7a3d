"""Heart disease, one client per hospital: logistic regression that no hospital could fit alone.

    aqg run --problem examples/heart.py:problem --data-dir DIR

Data: the UCI heart disease sets of Cleveland, Budapest, Zurich and Long Beach (920 patients, CC BY
4.0), https://archive.ics.uci.edu/dataset/45/heart+disease. Put ``processed.cleveland.data``,
``processed.hungarian.data``, ``processed.switzerland.data`` and ``processed.va.data`` into
``DIR/heart``; missing values may be written ``?`` or ``NaN``.

Every fifth patient of each hospital is in the test set. Values are scaled by the mean and the
deviation over all training patients, which hospitals can compute together from sums; a missing
value becomes the mean, and a column beside it says that it was missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import DataError
from aqg.objectives import make_objective
from aqg.sim.problem import Problem, Samples

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
SETTINGS = {"rounds": 300, "alpha": 0.1, "dtype": "float64", "recipe": "auto,gd,laq"}


def problem(data_dir: Path, seed: int, dtype: str = "float64", fraction: float = 1.0) -> Problem:
    """Make a client of each hospital, of that part of its patients."""
    hospitals = []
    for name in HOSPITALS:
        values, ill = _read_hospital(data_dir / "heart" / f"processed.{name}.data")
        kept = slice(max(10, round(fraction * len(ill))))
        hospitals.append((values[kept], ill[kept]))
    in_test = [np.arange(len(ill)) % 5 == 4 for _, ill in hospitals]
    pairs = list(zip(hospitals, in_test, strict=True))
    trained = np.concatenate([values[~t] for (values, _), t in pairs])
    mean, deviation = np.nanmean(trained, axis=0), np.nanstd(trained, axis=0)

    def columns(values: NDArray[Any]) -> NDArray[Any]:
        scaled = np.nan_to_num((values - mean) / np.maximum(deviation, 1e-9))
        ones = np.ones((len(values), 1))  # the model has no bias of its own
        return np.hstack([scaled, np.isnan(values), ones]).astype(dtype)

    objective = make_objective("logistic", 27, 2, l2=0.01, scaling="mean")
    return Problem(
        objective=objective,
        clients=tuple(Samples(columns(values[~t]), ill[~t]) for (values, ill), t in pairs),
        initial_params=objective.init_params(seed).astype(dtype),
        test=Samples(
            np.concatenate([columns(values[t]) for (values, _), t in pairs]),
            np.concatenate([ill[t] for (_, ill), t in pairs]),
        ),
    )


def _read_hospital(file: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the patients' 13 values, NaN where one is missing, and whether each is ill."""
    try:
        text = file.read_text(encoding="ascii").replace("?", "nan")
        table = np.array([line.split(",") for line in text.split()], np.float64)
    except OSError as error:
        raise DataError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{str(file)!r} is not a table of 14 columns: {error}") from None
    if table.ndim != 2 or table.shape[1] != 14:
        raise DataError(f"{str(file)!r} is not a table of 14 columns")
    return table[:, :13], (table[:, 13] > 0).astype(np.int64)
