"""Compile every kernel of the codec before it is needed."""

from __future__ import annotations

import numpy as np

from aqg.core.grids import Grid, num_levels
from aqg.core.messages import DenseUpload, Upload
from aqg.wire.frame import Known, decode, encode, encoded_size


def warm_up() -> None:
    """Run every kernel once on tiny messages.

    The first time on a machine this compiles them, which takes a while and is kept on disk; later
    it only loads them. Without it the first messages do the same.
    """
    random = np.random.default_rng(0)
    for width, dtype in ((4, np.uint8), (12, np.uint16)):
        peaked = np.minimum(random.geometric(0.7, 300), num_levels(Grid.MIDTREAD, width)) - 1
        flat = random.permutation(num_levels(Grid.MIDTREAD, width))[:100]
        for levels in (peaked, flat):
            _round_trip(Upload(levels.astype(dtype), 1.0, width, Grid.MIDTREAD))
    few = np.ones(100, np.uint8)
    few[7] = 2
    _round_trip(Upload(few, 1.0, 2, Grid.MIDTREAD))
    _round_trip(DenseUpload(np.ones(2000, np.float32)))
    for reference in (np.ones(100, np.float32), np.ones(100)):
        upload = Upload(few + np.uint8(6), 1.0, 4, Grid.MIDTREAD)
        _round_trip(upload, Known(reference, np.ones(100, np.int8)))
        _round_trip(upload, Known(reference))


def _round_trip(message: Upload | DenseUpload, known: Known | None = None) -> None:
    encoded_size(message, known=known)
    decode(encode(message, known=known), len(message), known=known)
