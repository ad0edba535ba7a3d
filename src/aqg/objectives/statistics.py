"""Statistics that are not trained: buffers that a forward pass changes, on a path of their own.

The running mean and variance of batch normalization are no parameters: no gradient carries them,
and a lossy compressor would make a variance negative. They go beside the update instead, in frames
of `aqg.wire.statistics`: a client sends the tensors that training changed, the server averages them
with the weights of the updates and sends the result down with the model.

* Normalization layers' buffers travel in every round; any other buffer of the module's state
  travels from the round on in which training changed it, so constants never do.
* Integer buffers count on: the server adds the largest increase of a client.
* All clients start from the very numbers the server holds, because it rounds them as it sends them.
* Where the mean over the last models is measured and kept (`aqg.core.step_sizes`), it goes with the
  same mean of their statistics: those of the last model alone do not fit it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from aqg.core.step_sizes import share_of_newest
from aqg.errors import GradientError
from aqg.objectives.layout import Buffers
from aqg.wire.statistics import (
    Section,
    StatisticsMessage,
    decode_statistics,
    encode_statistics,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from aqg.core.types import BoolArray, Float64Array
    from aqg.objectives.layout import ModelLayout
    from aqg.objectives.tensors import TensorSpec

Number = TypeVar("Number", np.float64, np.int64)

PRECISION = "half"
"""How statistics travel by default."""

_MAX_COUNT = 2**62


def sections(layout: ModelLayout) -> tuple[Section, ...]:
    """Return the tensors of a frame, in order."""
    floats = [Section(spec.size, spec.dtype) for spec in layout.statistics]
    return (*floats, *(Section(spec.size, "int") for spec in layout.counters))


class SharedStatistics(NamedTuple):
    """What the server holds, and every client starts a round from.

    Attributes:
        layout: names the tensors.
        buffers: their values.
        travels: for each tensor, whether it is in the frames to the clients.
        precision: ``"half"`` or ``"exact"``.
        average: ``γ`` of the mean over the models; 0 where none is kept.
        mean: the same mean of the values; None before the first round, or where none is kept.
        num_rounds: of how many rounds.

    """

    layout: ModelLayout
    buffers: Buffers
    travels: BoolArray
    precision: str
    average: float = 0.0
    mean: Float64Array | None = None
    num_rounds: int = 0

    @staticmethod
    def first(
        layout: ModelLayout, buffers: Buffers, precision: str = PRECISION, average: float = 0.0
    ) -> SharedStatistics:
        """Return what a run starts from: the module's own buffers, rounded as they travel."""
        travels = np.array(layout.tracked, np.bool_)
        return SharedStatistics(layout, buffers, travels, precision, average)._rounded()

    @property
    def averaged(self) -> Buffers:
        """What goes with the mean of the models so far; the buffers where none is kept."""
        return self.buffers if self.mean is None else self.buffers._replace(values=self.mean)

    def broadcast(self) -> bytes:
        """Return the frame that goes down with the model; empty where nothing travels."""
        if not self.travels.any():
            return b""
        message = StatisticsMessage(*self.buffers, self.travels)
        return encode_statistics(message, sections(self.layout), self.precision)

    def receive(self, frame: bytes) -> Buffers:
        """Return the buffers at a client that has this frame and otherwise its module's own."""
        if not frame:
            return self.buffers
        message = decode_statistics(frame, sections(self.layout))
        floats = len(self.layout.statistics)
        values = _chosen(
            self.layout.statistics, message.sent[:floats], self.buffers.values, message.values
        )
        counts = _chosen(
            self.layout.counters, message.sent[floats:], self.buffers.counts, message.counts
        )
        return Buffers(values, counts)

    def read(self, frame: bytes) -> StatisticsMessage:
        """Return what a client's frame says; raise `WireError` where it cannot be used."""
        if frame:
            return decode_statistics(frame, sections(self.layout))
        values = np.zeros(len(self.buffers.values))
        counts = np.zeros(len(self.buffers.counts), np.int64)
        return StatisticsMessage(values, counts, np.zeros(len(self.travels), np.bool_))

    def step(self, messages: Sequence[tuple[float, StatisticsMessage]]) -> SharedStatistics:
        """Return the statistics after the clients' messages, each with the client's weight.

        A tensor that a client did not send is as it was there.
        """
        if not messages:
            return self
        values = self.buffers.values.copy()
        for index, spec in enumerate(self.layout.statistics):
            sent = [(weight, m.values) for weight, m in messages if m.sent[index]]
            if not sent:
                continue
            total = sum(weight for weight, _ in sent)
            mean = sum(weight * found[spec.place] for weight, found in sent) / total
            held = self.buffers.values[spec.place]
            if len(sent) < len(messages) and np.isfinite(held).all():
                share = total / sum(weight for weight, _ in messages)
                mean = share * mean + (1 - share) * held
            values[spec.place] = mean
        counted = np.max([message.counts for _, message in messages], axis=0, initial=0)
        counts = np.minimum(self.buffers.counts + counted, _MAX_COUNT)
        travels = np.any([self.travels, *(message.sent for _, message in messages)], axis=0)
        stepped = self._replace(buffers=Buffers(values, counts), travels=travels)
        return stepped._rounded()._followed()

    def _followed(self) -> SharedStatistics:
        """Return this with the values in the mean; what had no number in it begins anew."""
        if not self.average:
            return self
        count, mean = self.num_rounds + 1, self.buffers.values.copy()
        if self.mean is not None:
            known = np.isfinite(self.mean)
            change = mean[known] - self.mean[known]
            mean[known] = self.mean[known] + share_of_newest(self.average, count) * change
        return self._replace(mean=mean, num_rounds=count)

    def _rounded(self) -> SharedStatistics:
        return self._replace(buffers=self.receive(self.broadcast()))


def describe_change(
    layout: ModelLayout, before: Buffers, after: Buffers, precision: str = PRECISION
) -> bytes:
    """Return a client's frame: the tensors that changed, and by how much counters grew.

    It is empty where none did.

    Raises:
        GradientError: a tensor changed to NaN or infinity; the text names it.

    """
    sent = []
    for spec in layout.statistics:
        old, new = before.values[spec.place], after.values[spec.place]
        has_changed = not np.array_equal(old, new, equal_nan=True)
        if has_changed and not np.isfinite(new).all():
            raise GradientError(f"buffer {spec.name!r} holds NaN or infinity after training")
        sent.append(has_changed)
    growth = after.counts - before.counts
    sent += [bool(growth[spec.place].any()) for spec in layout.counters]
    if not any(sent):
        return b""
    message = StatisticsMessage(after.values, growth, np.array(sent, np.bool_))
    return encode_statistics(message, sections(layout), precision)


def _chosen(
    specs: Iterable[TensorSpec],
    sent: BoolArray,
    held: NDArray[Number],
    found: NDArray[Number],
) -> NDArray[Number]:
    """Return ``held``, with the tensors that were sent as they were ``found``."""
    result = held.copy()
    for spec, is_sent in zip(specs, sent.tolist(), strict=True):
        if is_sent:
            result[spec.place] = found[spec.place]
    return result
