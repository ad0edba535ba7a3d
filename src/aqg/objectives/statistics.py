"""Statistics that are not trained: buffers that a forward pass changes, on a path of their own.

The running mean and variance of batch normalization are no parameters: no gradient carries them,
and a lossy compressor would make a variance negative. They go beside the update instead, in frames
of `aqg.wire.statistics`; the server averages them with the weights of the updates.

* Normalization layers' buffers travel in every round; any other buffer of the module's state
  travels from the round on in which training changed it, so constants never do.
* Integer buffers count on: the server adds the largest increase of a client.
* The server sends one byte per value, with error feedback; in half precision until a client has
  changed the tensor.
* A client sends changes by stochastic rounding to powers of two: four bits per value. No rounding
  makes a variance negative.
* Where the mean over the last models is measured and kept (`aqg.core.step_sizes`), it goes with the
  same mean of their statistics: those of the last model alone do not fit it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from aqg.core.step_sizes import share_of_newest
from aqg.core.types import BoolArray, Float64Array
from aqg.errors import GradientError, WireError
from aqg.objectives.layout import Buffers, ModelLayout, TensorSpec
from aqg.wire.statistics import Section, StatisticsMessage, decode_statistics, encode_statistics

Number = TypeVar("Number", np.float64, np.int64)

_MAX_COUNT = 2**62
_OCTAVES = 6
"""From the least power of two that is sent to the one below the largest change."""


def sections(layout: ModelLayout) -> tuple[Section, ...]:
    floats = [Section(spec.size, spec.dtype) for spec in layout.statistics]
    return (*floats, *(Section(spec.size, "int") for spec in layout.counters))


class SharedStatistics(NamedTuple):
    """What the server holds."""

    layout: ModelLayout  # names the tensors
    buffers: Buffers  # their values
    travels: BoolArray  # for each tensor, whether it is in the frames to the clients
    moves: BoolArray  # for each tensor, whether a client has ever changed it
    # what rounding left out of the values when they were sent (error feedback)
    residual: Float64Array
    # they travel in half precision both ways, as is right beside updates in full
    fine: bool = False
    average: float = 0.0  # ``γ`` of the mean over the models; 0 where none is kept
    # the same mean of the values; None before the first round, or where none is kept
    mean: Float64Array | None = None
    num_rounds: int = 0  # of how many rounds

    @staticmethod
    def first(
        layout: ModelLayout, buffers: Buffers, *, fine: bool = False, average: float = 0.0
    ) -> SharedStatistics:
        travels = np.array(layout.tracked, np.bool_)
        moves, residual = np.zeros_like(travels), np.zeros(len(buffers.values))
        return SharedStatistics(layout, buffers, travels, moves, residual, fine, average)

    @property
    def averaged(self) -> Buffers:
        """What goes with the mean of the models so far; the buffers where none is kept."""
        return self.buffers if self.mean is None else self.buffers._replace(values=self.mean)

    @property
    def received(self) -> tuple[Buffers, BoolArray]:
        """What `receive` returns at a client: the buffers, rounded as they are sent."""
        return receive(self.layout, self.buffers, self.broadcast())

    def broadcast(self) -> bytes:
        if not self.travels.any():
            return b""
        message = StatisticsMessage(
            self._with_residual(), self.buffers.counts, self.travels, self.moves
        )
        return encode_statistics(message, sections(self.layout), "half" if self.fine else "byte")

    def read(self, frame: bytes) -> StatisticsMessage:
        if frame:
            message = decode_statistics(frame, sections(self.layout))
            return self._with_start(message) if message.is_change else message
        values, counts = np.zeros_like(self.buffers.values), np.zeros_like(self.buffers.counts)
        return StatisticsMessage(values, counts, np.zeros_like(self.travels))

    def step(self, messages: Sequence[tuple[float, StatisticsMessage]]) -> SharedStatistics:
        """Return the statistics after the clients' messages, each with the client's weight.

        A tensor that a client did not send is as it was there.
        """
        if not messages:
            return self
        start, values = self.received[0].values, self.buffers.values.copy()
        for index, spec in enumerate(self.layout.statistics):
            sent = [(weight, m.values) for weight, m in messages if m.sent[index]]
            if not sent:
                continue
            total = sum(weight for weight, _ in sent)
            mean = sum(weight * found[spec.place] for weight, found in sent) / total
            held = start[spec.place]
            if len(sent) < len(messages) and np.isfinite(held).all():
                share = total / sum(weight for weight, _ in messages)
                mean = share * mean + (1 - share) * held
            values[spec.place] = mean
        counted = np.max([message.counts for _, message in messages], axis=0, initial=0)
        counts = np.minimum(self.buffers.counts + counted, _MAX_COUNT)
        moves = np.any([self.moves, *(message.sent for _, message in messages)], axis=0)
        wanted, residual = self._with_residual(), np.zeros(len(values))
        for spec, has_moved in zip(self.layout.statistics, self.moves, strict=False):
            if has_moved:
                residual[spec.place] = wanted[spec.place] - start[spec.place]
        stepped = self._replace(buffers=Buffers(values, counts), residual=residual)
        return stepped._replace(travels=self.travels | moves, moves=moves)._followed()

    def _with_residual(self) -> Float64Array:
        """Return the values plus the residual, where that has the same sign."""
        values = self.buffers.values
        wanted = values + self.residual
        return np.where(np.sign(wanted) == np.sign(values), wanted, values)

    def _with_start(self, message: StatisticsMessage) -> StatisticsMessage:
        """Return the message with changes added to what the client started from."""
        start, values = self.received[0].values, message.values.copy()
        for index, spec in enumerate(self.layout.statistics):
            if message.short is not None and message.short[index]:
                values[spec.place] += start[spec.place]
                if not np.isfinite(values[spec.place]).all():
                    raise WireError(f"the change of {spec.name!r} does not lead to numbers")
        return message._replace(values=values, short=None, is_change=False)

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


def receive(layout: ModelLayout, own: Buffers, frame: bytes) -> tuple[Buffers, BoolArray]:
    """Return the buffers at a client that has this frame and otherwise its module's own.

    The second array says for each tensor whether its change is enough of a reply: if it was in the
    frame, unless that is one in half precision, which asks for the same.
    """
    whole = np.zeros(len(layout.statistics) + len(layout.counters), np.bool_)
    if not frame:
        return own, whole
    message = decode_statistics(frame, sections(layout))
    floats = len(layout.statistics)
    values = _chosen(layout.statistics, message.sent[:floats], own.values, message.values)
    counts = _chosen(layout.counters, message.sent[floats:], own.counts, message.counts)
    return Buffers(values, counts), whole if message.short is None else message.sent


def describe_change(
    layout: ModelLayout, before: Buffers, after: Buffers, known: BoolArray
) -> bytes:
    """Return a client's frame: the tensors that changed, and by how much counters grew.

    It is empty where none did. Of some tensors the change is enough (``known``, see `receive`);
    others are sent as they are. The random numbers depend on the values alone: the same training
    gives the same frame.

    Raises:
        GradientError: a tensor changed to NaN or infinity; the text names it.
    """
    sent = []
    values = after.values.copy()
    random = np.random.default_rng(zlib.crc32(values.tobytes() + after.counts.tobytes()))
    for index, spec in enumerate(layout.statistics):
        old, new = before.values[spec.place], after.values[spec.place]
        has_changed = not np.array_equal(old, new, equal_nan=True)
        if has_changed and not np.isfinite(new).all():
            raise GradientError(f"buffer {spec.name!r} holds NaN or infinity after training")
        sent.append(has_changed)
        if has_changed and known[index]:
            values[spec.place] = _rounded_change(old, new, random)
    growth = after.counts - before.counts
    sent += [bool(growth[spec.place].any()) for spec in layout.counters]
    if not any(sent):
        return b""
    message = StatisticsMessage(values, growth, np.array(sent, np.bool_), known)
    has_short = bool((message.sent & known).any())
    return encode_statistics(message, sections(layout), "change" if has_short else "half")


def _rounded_change(old: Float64Array, new: Float64Array, random: Generator) -> Float64Array:
    """Return the change by stochastic rounding to zero and seven powers of two, unbiased.

    It is rounded down, always, where the power above would change the sign of a value that keeps
    its sign: there it is biased.
    """
    change = new - old
    size = np.abs(change)
    least = 2.0 ** (np.frexp(size.max())[1] - _OCTAVES)
    below = np.ldexp(0.5, np.frexp(size)[1])
    below[below < least] = 0.0
    above = np.maximum(2 * below, least)
    is_up = random.random(len(size)) * (above - below) < size - below
    shrinks = np.sign(old) * np.sign(change) < 0
    changes_sign = shrinks & (size <= np.abs(old)) & (above > np.abs(old))
    return np.copysign(np.where(is_up & ~changes_sign, above, below), change)


def _chosen(
    specs: Iterable[TensorSpec], sent: BoolArray, held: NDArray[Number], found: NDArray[Number]
) -> NDArray[Number]:
    result = held.copy()
    for spec, is_sent in zip(specs, sent.tolist(), strict=True):
        if is_sent:
            result[spec.place] = found[spec.place]
    return result
