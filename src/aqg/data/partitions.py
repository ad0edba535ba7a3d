"""Partitions: which client holds which training samples.

Every part is a sorted int64 array of indices into the training set. Parts never overlap, none is
empty, and all but ``source`` use every sample. The same seed gives the same parts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from aqg.core.types import IntArray
from aqg.data.datasets import Dataset
from aqg.errors import DataError, require
from aqg.settings import Bound
from aqg.spec import make_named

MAX_CONCENTRATION = 1e9
"""Largest Dirichlet concentration: far beyond where proportions can be told from equal ones."""
_SEED_STREAM = 0x70617274  # keeps these draws apart from others made with the same seed
_MAX_DRAWS = 100

Parts: TypeAlias = Sequence[IntArray]
Split: TypeAlias = Callable[[Dataset, int, np.random.Generator], Parts]


@dataclass(frozen=True)
class Partition:
    """A way to split a training set among clients; ``spec`` names it."""

    spec: str
    _split: Split = field(compare=False, repr=False)

    def split(self, dataset: Dataset, num_clients: int, seed: int) -> tuple[IntArray, ...]:
        """Return the sorted sample indices of each of ``num_clients`` clients."""
        require(num_clients >= 1, "clients", num_clients, "at least 1")
        require(seed >= 0, "seed", seed, "at least 0")
        if num_clients > len(dataset):
            raise DataError(
                f"cannot split {len(dataset)} samples of {dataset.name!r} "
                f"among {num_clients} clients"
            )
        generator = np.random.default_rng([seed, _SEED_STREAM])
        parts = self._split(dataset, num_clients, generator)
        return tuple(np.sort(part).astype(np.int64, copy=False) for part in parts)


def _iid(dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Parts:
    return np.array_split(generator.permutation(len(dataset)), num_clients)


def _label(dataset: Dataset, num_clients: int, _: np.random.Generator) -> Parts:
    """Give client ``m`` label ``m mod num_classes``; the seed plays no part.

    Clients with the same label share its samples in consecutive slices whose sizes differ by at
    most one.
    """
    _require_classes(dataset, "label")
    num_classes = dataset.num_classes
    if num_clients < num_classes:
        raise DataError(
            f"one label per client needs at least {num_classes} clients for the "
            f"{num_classes} labels of {dataset.name!r}, got {num_clients}"
        )
    parts: list[IntArray] = [np.empty(0, np.int64)] * num_clients
    for label in range(num_classes):
        samples = np.flatnonzero(dataset.labels == label)
        num_holders = len(range(label, num_clients, num_classes))
        if len(samples) < num_holders:
            raise DataError(
                f"label {label} of {dataset.name!r} has {len(samples)} samples, "
                f"too few for the {num_holders} of {num_clients} clients that hold it"
            )
        parts[label::num_classes] = np.array_split(samples, num_holders)
    return parts


def _source(
    dataset: Dataset, num_clients: int, generator: np.random.Generator, shuffled: bool = False
) -> Parts:
    """Cut each original set into equal slices, as in the paper's 18 clients.

    With ``S`` sets and ``M`` clients, the first ``M/S`` clients share set 0, the next ``M/S`` set
    1, and so on. What is left of a set after equal slices is dropped. Slices are consecutive, and
    the seed plays no part, unless the sets are ``shuffled`` first.
    """
    if dataset.sources is None:
        raise DataError(
            f"dataset {dataset.name!r} has a single source; partition 'source' needs one made "
            f"of several sets, such as 'heterogeneous'"
        )
    sources = np.unique(dataset.sources)
    if num_clients % len(sources):
        raise DataError(
            f"{num_clients} clients cannot share the {len(sources)} sources of "
            f"{dataset.name!r} evenly; use a multiple of {len(sources)}"
        )
    clients_per_source = num_clients // len(sources)
    parts = []
    for source in sources:
        samples = np.flatnonzero(dataset.sources == source)
        if shuffled:
            samples = generator.permutation(samples)
        size = len(samples) // clients_per_source
        if size == 0:
            raise DataError(
                f"source {source} of {dataset.name!r} has {len(samples)} samples, "
                f"too few for {clients_per_source} clients"
            )
        parts += [samples[i * size : (i + 1) * size] for i in range(clients_per_source)]
    return parts


def _natural(dataset: Dataset, num_clients: int, _: np.random.Generator) -> Parts:
    """Give client ``m`` the samples that `Dataset.clients` says; the seed plays no part."""
    if dataset.clients is None:
        raise DataError(
            f"dataset {dataset.name!r} does not say which client a sample belongs to; "
            "partition 'natural' needs a file with an array 'client'"
        )
    sizes = np.bincount(dataset.clients)
    if num_clients != len(sizes):
        raise DataError(
            f"dataset {dataset.name!r} has {len(sizes)} clients of its own, and clients is "
            f"{num_clients}; leave clients out, or choose another partition"
        )
    order = np.argsort(dataset.clients, kind="stable")
    return np.split(order, np.cumsum(sizes)[:-1])


def _dirichlet(concentration: float) -> Split:
    """Give client ``m`` of each label the share ``p_m``, with ``p ~ Dirichlet(a, ..., a)``.

    Shares are drawn anew, up to 100 times, until every client has a sample. If one still has none,
    it gets a sample of the client that holds most, from that client's most frequent label.
    """
    bound = Bound(0, MAX_CONCENTRATION, open_low=True)
    require(concentration in bound, "the number in dirichlet:A", concentration, str(bound))

    def split(dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Parts:
        _require_classes(dataset, f"dirichlet:{concentration}")
        label_sizes = np.bincount(dataset.labels, minlength=dataset.num_classes)
        for _ in range(_MAX_DRAWS):
            shares = generator.dirichlet(np.full(num_clients, concentration), size=len(label_sizes))
            ends = np.floor(np.cumsum(shares, axis=1) * label_sizes[:, np.newaxis]).astype(np.int64)
            ends[:, -1] = label_sizes  # the shares sum to one only up to rounding
            counts = np.diff(ends, axis=1, prepend=0)  # labels × clients
            if counts.sum(axis=0).all():
                break
        else:
            _feed_empty_clients(counts)
        by_label = []
        for label, cuts in enumerate(np.cumsum(counts, axis=1)[:, :-1]):
            own = generator.permutation(np.flatnonzero(dataset.labels == label))
            by_label.append(np.split(own, cuts))
        return [np.concatenate(pieces) for pieces in zip(*by_label, strict=True)]

    return split


def _feed_empty_clients(counts: IntArray) -> None:
    totals = counts.sum(axis=0)
    for client in np.flatnonzero(totals == 0):
        giver = totals.argmax()
        label = counts[:, giver].argmax()
        counts[label, giver] -= 1
        counts[label, client] += 1
        totals[giver] -= 1
        totals[client] += 1


def _shards(shards_per_client: int) -> Split:
    """Cut samples sorted by label into ``M·K`` near-equal shards, and deal ``K`` to each client."""
    require(shards_per_client >= 1, "the number in shards:K", shards_per_client, "at least 1")

    def split(dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Parts:
        _require_classes(dataset, f"shards:{shards_per_client}")
        num_shards = num_clients * shards_per_client
        if num_shards > len(dataset):
            raise DataError(
                f"cannot cut {len(dataset)} samples of {dataset.name!r} into {num_shards} shards "
                f"({shards_per_client} for each of {num_clients} clients)"
            )
        shards = np.array_split(np.argsort(dataset.labels, kind="stable"), num_shards)
        dealt = generator.permutation(num_shards).reshape(num_clients, -1)
        return [np.concatenate([shards[shard] for shard in hand]) for hand in dealt]

    return split


def _require_classes(dataset: Dataset, spec: str) -> None:
    if not dataset.num_classes:
        raise DataError(
            f"partition {spec!r} needs one class per sample, and dataset {dataset.name!r} has "
            f"{dataset.labels.dtype} targets of shape {dataset.labels.shape}; use iid or natural"
        )


PARTITIONS: dict[str, Callable[..., Split]] = {
    "iid": lambda: _iid,
    "label": lambda: _label,
    "source": lambda *, shuffled=False: partial(_source, shuffled=shuffled),
    "natural": lambda: _natural,
    "dirichlet": _dirichlet,
    "shards": _shards,
}


def parse_partition(spec: str) -> Partition:
    """Return the partition that ``spec`` names, such as ``dirichlet:0.3``."""
    return Partition(spec, make_named("partition", spec, PARTITIONS))


def partition_table(dataset: Dataset, parts: Sequence[IntArray]) -> list[dict[str, int | str]]:
    """Return one row per client: its samples in all, of each label and of each source."""
    columns = {"label": (dataset.labels, dataset.num_classes)}
    if dataset.sources is not None:
        columns["source"] = (dataset.sources, int(dataset.sources.max()) + 1)
    rows = []
    for client, part in enumerate(parts):
        row: dict[str, int | str] = {"client": client, "samples": len(part)}
        for name, (values, count) in columns.items():
            if count:
                found = np.bincount(values[part], minlength=count).tolist()
                row |= {f"{name} {number}": held for number, held in enumerate(found)}
        rows.append(row)
    return rows


def format_partition_table(rows: Sequence[Mapping[str, int | str]]) -> str:
    """Return the table as plain text; a dot stands for no sample."""
    lines = ["  ".join(rows[0])]
    for row in rows:
        cells = {
            name: str(value) if value or name == "client" else "." for name, value in row.items()
        }
        lines.append("  ".join(cell.rjust(len(name)) for name, cell in cells.items()))
    return "\n".join(lines)
