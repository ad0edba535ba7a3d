"""The log: entries while they are short, a snapshot when that is shorter, and no more kept."""

from hypothesis import given
from hypothesis import strategies as st

from aqg.protocol.log import ModelLog
from aqg.wire.entry import log_overhead


def never():
    raise AssertionError("no snapshot is wanted here")


def test_one_entry_behind_is_one_entry():
    log = ModelLog()
    for size in (100, 5, 7):
        log.append(bytes(size))
    assert log.round == 4
    delivery = log.deliver(3, never, never)
    assert (delivery.first, delivery.snapshot) == (3, b"")
    assert delivery.num_bytes == log_overhead(3, 1) + 7 == len(log.frame(3))
    assert log.deliver(4, never, never).num_bytes == log_overhead(4, 0) == len(log.frame(4))


def test_a_snapshot_is_taken_when_it_is_shorter():
    log = ModelLog()
    for _ in range(20):
        log.append(bytes(10))
    delivery = log.deliver(1, lambda: bytes(50), never)
    assert (delivery.first, len(delivery.snapshot)) == (21, 50)
    assert delivery.num_bytes == 50 + log_overhead(21, 0)
    log.append(bytes(10))
    later = log.deliver(2, never, never)  # the log has not grown enough for a new one
    assert (later.first, later.num_bytes) == (21, 50 + log_overhead(21, 1) + 10)
    assert not log.deliver(19, never, never).snapshot


def test_someone_unknown_gets_a_snapshot():
    log = ModelLog()
    log.append(b"x")
    for position in (0, 5, -1):
        assert log.deliver(position, lambda: b"snapshot", never).snapshot == b"snapshot"


def test_what_no_one_wants_is_dropped():
    log = ModelLog()
    for _ in range(20):
        log.append(bytes(10))
    log.deliver(1, lambda: bytes(50), never)
    log.cut(oldest=1)
    assert log.first == 16  # five entries of ten bytes are as long as the snapshot
    log.cut(oldest=19)
    assert log.first == 19
    assert log.deliver(3, never, never).snapshot == bytes(50)  # that of this round


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=80),
    st.integers(10, 300),
    st.randoms(use_true_random=False),
)
def test_a_delivery_is_never_longer_than_the_entries(sizes, snapshot_bytes, random):
    log = ModelLog()
    positions = [1] * 4
    for size in sizes:
        log.append(bytes(size))
        for client in range(4):
            if random.random() < 0.3:
                held = positions[client]
                plain = log_overhead(held, log.round - held) + sum(sizes[held - 1 : log.round - 1])
                assert log.deliver(held, lambda: bytes(snapshot_bytes), never).num_bytes <= plain
                positions[client] = log.round
        log.cut(min(positions))
        assert log.first <= min(min(positions), log.round) or log.snapshot_round >= log.first
        kept = sum(map(len, log.entries))
        assert kept <= snapshot_bytes + sum(sizes[min(log.snapshot_round, min(positions)) - 1 :])
