"""Clients with unequally many samples as one stack: cut into pieces of one length.

The last piece of a client is filled up with samples of weight zero. A GPU computes all pieces in
one product each way, where a loop over the clients would keep it waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from aqg.objectives.closed_form import ClosedForm
from aqg.sim.problem import Samples

PIECE_LENGTH = 512
"""Longest piece: with ten classes, a product of so many samples keeps a share of a GPU busy."""


class Pieces(NamedTuple):
    """``P`` pieces of ``L`` samples, on a device.

    Attributes:
        features: ``(P, L, f)``; the pieces of a client follow each other.
        labels: ``(P, L)``.
        weights: what a sample counts in its client's loss, ``(P, L)``.
        owners: 1 where a piece belongs to a client, ``(M, P)``.
        starts: where each client begins, counted in samples.

    """

    features: Any
    labels: Any
    weights: Any
    owners: Any
    starts: list[int]

    def losses_and_gradients(self, objective: ClosedForm, params: Any) -> tuple[Any, Any]:
        """Return the loss ``(M,)`` and the gradient ``(M, num_params)`` of all clients."""
        losses, gradients = objective.weighted_losses_and_gradients(
            params, self.features, self.labels, self.weights
        )
        losses, gradients = self.owners @ losses, self.owners @ gradients
        if objective.l2:
            losses += objective.l2 / 2 * (params @ params)
            gradients += objective.l2 * params
        return losses, gradients


def cut(
    clients: Sequence[Samples], weight: Callable[[int], float], put: Callable[[Any], Any]
) -> Pieces:
    """Cut all clients; ``weight`` says what each of so many samples counts, ``put`` moves arrays.

    >>> from aqg.sim.problem import Samples
    >>> clients = [Samples(np.ones((n, 3)), np.zeros(n, np.int64)) for n in (600, 100)]
    >>> pieces = cut(clients, lambda count: 1 / count, put=np.asarray)
    >>> pieces.features.shape, pieces.owners.tolist()
    ((3, 512, 3), [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    """
    length = min(PIECE_LENGTH, max(len(client.labels) for client in clients))
    counts = [-(-len(client.labels) // length) for client in clients]
    num_pieces = sum(counts)
    first = clients[0]
    features = np.zeros((num_pieces * length, first.features.shape[1]), first.features.dtype)
    labels = np.zeros(num_pieces * length, first.labels.dtype)
    weights = np.zeros(num_pieces * length, first.features.dtype)
    owners = np.zeros((len(clients), num_pieces), first.features.dtype)
    starts = []
    piece = 0
    for client, (samples, count) in enumerate(zip(clients, counts, strict=True)):
        start = piece * length
        rows = slice(start, start + len(samples.labels))
        features[rows], labels[rows] = samples
        weights[rows] = weight(len(samples.labels))
        owners[client, piece : piece + count] = 1
        starts.append(start)
        piece += count
    return Pieces(
        features=put(features.reshape(num_pieces, length, -1)),
        labels=put(labels.reshape(num_pieces, length)),
        weights=put(weights.reshape(num_pieces, length)),
        owners=put(owners),
        starts=starts,
    )
