"""Problems with natural clients and some others, most of them from files in the data directory.

Each function makes the problem of a task (`aqg.studies.contest.tasks`). The examples are the same
with settings of their own; ``fraction`` takes a part of the data. The files, relative to the data
directory:

``heart/processed.{cleveland,hungarian,switzerland,va}.data``
    920 patients of four hospitals (UCI heart disease, CC BY 4.0); missing values as ``?`` or NaN.
``watch/watch_windows.npz``
    4,677 windows of smartwatch motion of ten persons: ``X`` (N×100×6), ``y``, ``subject``,
    ``recording`` and ``side``, the arm (Burns and others, 2018; BSD).
``shakespeare/roles.json.gz``
    the speeches of 37 plays, ``{"play__ROLE": ["a speech", ...]}`` (public domain).
``cifar10.npz``
    ``x_train``, ``y_train``, ``x_test``, ``y_test``, images as bytes N×32×32×3.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aqg.data import load_dataset, parse_partition
from aqg.data.datasets import read_arrays
from aqg.errors import DataError
from aqg.models import DataShape, make_module
from aqg.objectives import make_objective
from aqg.sim.problem import Problem, Samples

if TYPE_CHECKING:
    from torch import nn

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
TEST_PERSONS = (9, 10)
LENGTH = 64
"""Characters that the transformer sees."""
_CIFAR_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
_CIFAR_DEVIATION = np.array([0.2470, 0.2435, 0.2616], np.float32)


def heart(data_dir: Path, seed: int, dtype: str = "float64", fraction: float = 1.0) -> Problem:
    """Make a client of each hospital; every fifth patient is in the test set.

    Values are scaled by the mean and the deviation over all training patients, which hospitals can
    compute together from sums; a missing value becomes the mean, and a column beside it says that
    it was missing.
    """
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


def watch(
    data_dir: Path, dtype: str = "float32", fraction: float = 1.0, validates: bool = True
) -> Problem:
    """Make a client of each of eight persons; the test set is two others.

    Neighboring windows overlap, so a random test set would hold half of what was trained on. The
    validation set is the last fifth of every recording, and the window before it is left out.
    """
    problem = watch_problem(
        data_dir, dtype, _motion_network(), False, round(1 / fraction), validates
    )
    return problem if validates else replace(problem, validation=None)


def watch_problem(
    data_dir: Path,
    dtype: str,
    module: nn.Module,
    by_arm: bool,
    step: int = 1,
    holds_out: bool = True,
) -> Problem:
    names = ("X", "y", "subject", "recording", *(("side",) if by_arm else ()))
    arrays = read_arrays(data_dir / "watch" / "watch_windows.npz", names)
    arrays = {name: array[::step] for name, array in arrays.items()}
    windows, exercises, persons = arrays["X"], arrays["y"].astype(np.int64), arrays["subject"]
    in_test = np.isin(persons, TEST_PERSONS)
    mean, deviation = windows[~in_test].mean((0, 1)), windows[~in_test].std((0, 1))
    windows = ((windows - mean) / deviation).astype(dtype)
    trains, validates = (np.zeros(len(persons), bool) for _ in range(2))
    for recording in np.unique(arrays["recording"][~in_test]):
        places = np.flatnonzero(arrays["recording"] == recording)
        first = len(places) - len(places) // 5
        trains[places[: first - 1] if holds_out else places] = True
        validates[places[first:]] = True
    owners = 2 * persons.astype(np.int64) + (arrays["side"] if by_arm else 0)
    problem = Problem.from_module(
        module,
        clients=[
            (windows[trains & (owners == owner)], exercises[trains & (owners == owner)])
            for owner in np.unique(owners[~in_test])
        ],
        test=(windows[in_test], exercises[in_test]),
        dtype=dtype,
    )
    return replace(problem, validation=Samples(windows[validates], exercises[validates]))


def _motion_network(width: int = 24) -> nn.Module:
    from torch import Tensor, nn

    class TimeFirst(nn.Module):
        def forward(self, windows: Tensor) -> Tensor:
            return windows.movedim(-1, -2)

    class MeanOverTime(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.mean(-1)

    layers: list[nn.Module] = [TimeFirst()]
    for before, after in itertools.pairwise((6, width, width, width)):
        layers.append(nn.Conv1d(before, after, kernel_size=5, stride=2, padding=2))
        layers += [nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, MeanOverTime(), nn.Dropout(0.2), nn.Linear(width, 7))


def shakespeare(
    data_dir: Path,
    dtype: str,
    clients: int,
    by: str = "role",
    skip: int = 0,
    metrics: str | None = None,
    make_net: Callable[[int], nn.Module] | None = None,
) -> Problem:
    """Make a client of each of the largest roles, or plays (``by=play``).

    The ``skip`` largest of all are left out, and by default a transformer reads them. The last
    tenth of every client's speeches is its part of the test set.
    """
    from aqg.models.nets import Transformer

    speeches = read_roles(data_dir)
    alphabet = alphabet_of(speeches)
    if by == "play":
        plays: dict[str, list[str]] = {}
        for role, texts in speeches.items():
            plays.setdefault(role.partition("__")[0], []).extend(texts)
        speeches = plays
    largest = sorted(speeches, key=lambda name: -sum(map(len, speeches[name])))
    parts, tests = [], []
    for name in largest[skip : skip + clients]:
        texts = speeches[name]
        last = len(texts) - len(texts) // 10
        parts.append(text_windows(texts[:last], alphabet))
        tests.append(text_windows(texts[last:], alphabet))
    return Problem.from_module(
        Transformer(len(alphabet), LENGTH) if make_net is None else make_net(len(alphabet)),
        clients=parts,
        test=tuple(np.concatenate(part)[::4] for part in zip(*tests, strict=True)),
        metrics=metrics,
        dtype=dtype,
    )


def read_roles(data_dir: Path) -> dict[str, list[str]]:
    file = data_dir / "shakespeare" / "roles.json.gz"
    try:
        with gzip.open(file, "rt", encoding="utf-8") as text:
            roles: dict[str, list[str]] = json.load(text)
    except OSError as error:
        raise DataError(f"{str(file)!r} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DataError(f"{str(file)!r} is not JSON: {error}") from None
    return roles


def alphabet_of(roles: dict[str, list[str]]) -> dict[str, int]:
    """Return a number for every character; 0 is the line break between speeches."""
    letters = {letter for speeches in roles.values() for text in speeches for letter in text}
    return {letter: token for token, letter in enumerate(["\n", *sorted(letters - {"\n"})])}


def text_windows(texts: list[str], alphabet: dict[str, int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cut a text into pieces; the target at every place is the character after it."""
    tokens = np.array([alphabet[letter] for letter in "\n".join(["", *texts, ""])], np.int64)
    num_windows = (len(tokens) - 1) // LENGTH
    size, shape = num_windows * LENGTH, (num_windows, LENGTH)
    return tokens[:size].reshape(shape), tokens[1 : size + 1].reshape(shape)


def cifar10(
    data_dir: Path,
    seed: int,
    dtype: str = "float32",
    clients: int = 10,
    images: int = 50_000,
    norm: str = "group",
    alpha: float = 0.5,
) -> Problem:
    """Split some of the images by Dirichlet(alpha) over labels; a quarter as many are tested.

    With ``norm=group`` a plain convolutional network of 355,658 parameters with group
    normalization, with ``norm=batch`` a small residual network with batch normalization.
    """
    data = load_dataset(str(data_dir / "cifar10.npz"))
    assert data.test_features is not None
    assert data.test_labels is not None
    step, test_step = len(data) // images, max(1, 4 * len(data.test_labels) // images)
    data = replace(
        data,
        features=(data.features[::step][:images] - _CIFAR_MEAN) / _CIFAR_DEVIATION,
        labels=data.labels[::step][:images],
        test_features=(data.test_features[::test_step] - _CIFAR_MEAN) / _CIFAR_DEVIATION,
        test_labels=data.test_labels[::test_step],
    )
    parts = parse_partition(f"dirichlet:{alpha}").split(data, clients, seed)
    module = (
        _image_network()
        if norm == "group"
        else make_module(f"resnet8:norm={norm}", DataShape.of(data), seed)
    )
    return Problem.from_module(
        module,
        clients=[(data.features[part], data.labels[part]) for part in parts],
        test=(data.test_features, data.test_labels),
        dtype=dtype,
    )


def _image_network() -> nn.Module:
    from torch import Tensor, nn

    class ChannelsFirst(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.movedim(-1, -3)

    layers: list[nn.Module] = [ChannelsFirst()]
    for before, after in itertools.pairwise((3, 64, 128, 128)):
        layers.append(nn.Conv2d(before, after, kernel_size=3, padding=1))
        layers += [nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 10))
