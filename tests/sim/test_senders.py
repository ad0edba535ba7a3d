"""Who speaks, against the rule written with arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aqg.core.track import who_sends

CLIENT = st.tuples(st.booleans(), st.booleans(), st.integers(0, 5))


@settings(deadline=None)
@given(st.lists(CLIENT, max_size=20), st.integers(1, 4))
def test_everyone_sends_or_is_skipping_or_is_out_of_range(clients, max_staleness):
    columns = np.array(clients, np.int64).reshape(-1, 3)
    wanting, in_range = columns[:, 0] == 1, columns[:, 1] == 1
    before, after = columns[:, 2].copy(), columns[:, 2].copy()
    senders, skipping, faulty = who_sends(wanting, in_range, after, max_staleness)

    send = (wanting | (before >= max_staleness)) & in_range
    assert senders.tolist() == np.flatnonzero(send).tolist()
    assert skipping.tolist() == np.flatnonzero(in_range & ~send).tolist()
    assert faulty.tolist() == np.flatnonzero(~in_range).tolist()
    expected = np.where(send, 0, before + (in_range & ~send))
    assert after.tolist() == expected.tolist()
