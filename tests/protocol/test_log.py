"""The log: entries while they are short, a snapshot when that is shorter, and no more kept."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg import make_recipe
from aqg.core.downlink import Condensed, Exact
from aqg.core.optimizers import make_optimizer
from aqg.core.round import init_client, respond
from aqg.core.server import Step, take_message
from aqg.core.types import from_arrays, to_arrays
from aqg.errors import RunError, WireError
from aqg.protocol.log import (
    STATE_DIGEST_BYTES,
    LogState,
    LostError,
    ModelLog,
    Parcel,
    Publisher,
    Terms,
    first_held,
    follow,
    holding_of,
)
from aqg.protocol.server import MirrorBook
from aqg.wire.entry import encode_log, log_overhead, log_rounds, log_since

SIZE = 400


def never():
    raise AssertionError("no snapshot is wanted here")


def test_a_log_sends_entries_or_a_snapshot_and_keeps_no_more():
    log = ModelLog()
    log.append(bytes(10))
    for position in (0, 5, -1):  # someone unknown
        assert log.deliver(position, lambda: b"snapshot", never).snapshot == b"snapshot"
    log = ModelLog()
    for _ in range(20):
        log.append(bytes(10))
    for position in (20, 21):  # one entry, or none: the normal case
        delivery = log.deliver(position, never, never)
        assert (delivery.first, delivery.snapshot) == (position, b"")
        overhead = log_overhead(position, 21 - position)
        assert delivery.num_bytes == overhead + 10 * (21 - position) == len(log.frame(position))
    delivery = log.deliver(1, lambda: bytes(50), never)
    assert (delivery.first, len(delivery.snapshot)) == (21, 50)
    assert delivery.num_bytes == 50 + log_overhead(21, 0)
    assert log.deliver(1, never, never) == delivery  # there is one of this round
    log.append(bytes(10))
    later = log.deliver(2, never, never)  # the log has not grown enough for a new one
    assert (later.first, later.num_bytes) == (21, 50 + log_overhead(21, 1) + 10)
    assert not log.deliver(19, never, never).snapshot
    log.cut(oldest=1)
    assert log.first == 16  # five entries of ten bytes are as long as the snapshot
    log.cut(oldest=19)
    assert log.first == 19
    assert log.deliver(3, lambda: b"new", never).snapshot == b"new"


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


class Book(MirrorBook):
    """A server whose only sender is a stream of noise, and clients that read its log."""

    @staticmethod
    def of(recipe, downlink, optimizer="sgd"):
        recipe, start = make_recipe(recipe), np.random.default_rng(1).standard_normal(SIZE)
        step = Step(0.1, optimizer=make_optimizer(optimizer), downlink=downlink)
        book = Book.first(recipe, start.astype(np.float32), np.ones(3), step)
        book.terms, book.rng = Terms(recipe, SIZE, "float32"), np.random.default_rng(2)
        return book

    @property
    def start(self):
        return self.publisher.start

    def parcel(self, client):
        return self.publisher.parcel(client, self.public)

    def pass_rounds(self, count=1):
        """Take in an upload in each round; some pass without a step."""
        for _ in range(count):
            if self.round % 50 == 7:
                self.skip_step()
                continue
            upload = quantized(self.recipe, self.rng.standard_normal(SIZE).astype(np.float32))
            self.state = take_message(self.recipe, self.state, 0, upload)
            self.step()

    def follow(self, client, held):
        public = follow(self.terms, self.parcel(client), held, lambda: self.start)
        self.publisher.followed(client)
        return public


def quantized(recipe, vector):
    state = init_client(recipe, len(vector), vector.dtype)
    return respond(recipe, state, vector, 0.0, (0, 0, 1), float("nan"))[1]


@pytest.mark.parametrize(
    ("recipe", "downlink"),
    [pytest.param("laq", Exact(), marks=pytest.mark.soak), ("stc", Condensed())],
)
def test_a_client_that_misses_rounds_is_brought_up_to_date(recipe, downlink):
    book = Book.of(recipe, downlink, "momentum")
    held = [first_held(book.terms, lambda: book.start)] * 3
    for pause in (1, 10, 1000):
        for _ in range(pause):
            held[0] = book.follow(0, held[0])
            book.pass_rounds()
        parcel = book.parcel(1)
        held[1] = book.follow(1, held[1])
        assert held[1].digest() == book.public.digest()
        size = len(parcel.snapshot) + len(parcel.log)
        assert size < 4 * SIZE * (pause + 5)
        if pause == 1:
            assert not parcel.snapshot
            assert log_rounds(parcel.log) == range(book.round - 1, book.round)
        if pause == 1000:  # a thousand entries are longer than the model
            assert parcel.snapshot
            assert size < 20 * SIZE
    state = book.publisher.state()
    assert sum(map(len, state.entries)) <= 60 * SIZE, "the log outgrows a snapshot"
    assert len(state.digests) == len(state.entries) + 1
    assert np.array_equal(state.positions, [book.round - 1, book.round, 1])


@pytest.mark.parametrize(
    ("recipe", "downlink"), [("laq", Condensed()), ("onebit", Exact()), ("onebit", Condensed())]
)
def test_entries_that_a_client_has_are_left_out_of_account(recipe, downlink):
    book = Book.of(recipe, downlink)
    held = [first_held(book.terms, lambda: book.start)]
    for _ in range(5):
        book.pass_rounds()
        parcel = book.parcel(0)  # no reply arrives: the server thinks that it holds round 1
        assert log_rounds(parcel.log).start == 1
        held.append(follow(book.terms, parcel, held[-1], lambda: None))
    assert held[-1].digest() == book.publisher.digest
    old = Parcel(4, bytes(4), encode_log(1, book.publisher.state().entries[:3]))
    with pytest.raises(LostError, match="round 6 is held here, which is later than round 4"):
        follow(book.terms, old, held[-1], lambda: None)
    with pytest.raises(WireError, match="the log has rounds 1 to 5, not 7"):
        log_since(parcel.log, 7)


def test_only_what_has_the_digest_of_its_round_gets_entries():
    book = Book.of("laq", Exact())
    first = first_held(book.terms, lambda: book.start)
    assert first is not None
    book.pass_rounds(4)
    held = book.follow(1, first)
    book.pass_rounds(3)
    old = holding_of(book.terms, held, lambda: book.start)
    book.publisher.positions[1] = book.round
    book.publisher.lost(1, old)  # a restored backup
    assert book.publisher.positions[1] == old.round
    book.publisher.lost(1, old)  # it was sent entries from there, and they were no help
    assert book.publisher.positions[1] == 0
    moved = held.track._replace(position=held.track.position + 1)
    other = held._replace(track=moved)
    book.publisher.lost(1, holding_of(book.terms, other, lambda: book.start))
    assert book.publisher.positions[1] == 0
    relative = book.parcel(1)
    book.publisher.lost(1, holding_of(book.terms, None, lambda: None))
    absolute = book.parcel(1)
    assert (relative.snapshot[1], absolute.snapshot[1]) == (1, 0)
    for parcel in (relative, absolute):
        public = follow(book.terms, parcel, None, lambda: book.start)
        assert public.digest() == book.publisher.digest


def test_the_log_comes_back_from_arrays():
    book = Book.of("laq", Exact())
    book.pass_rounds(3)
    state = book.publisher.state()
    again = from_arrays(LogState, to_arrays(state))
    assert again[1:6] == state[1:6]
    assert again.positions.tolist() == state.positions.tolist()
    arrays = to_arrays(state)
    arrays["digests"] = arrays["digests"][:STATE_DIGEST_BYTES]
    with pytest.raises(RunError, match="digests has 4 bytes; its parts have"):
        from_arrays(LogState, arrays)
    with pytest.raises(RunError, match="3 digests for 3 entries"):
        Publisher(book.start, state._replace(digests=state.digests[:3]))


@pytest.mark.parametrize(("recipe", "most_bytes"), [("auto", 5_000), ("lean", 5.1 * 50_000)])
def test_the_server_holds_no_more_of_a_client_than_it_needs(recipe, most_bytes):
    num_params, num_clients = 50_000, 40
    chosen = make_recipe(recipe)
    start = np.zeros(num_params, np.float32)
    book = MirrorBook.first(chosen, start, np.ones(num_clients), Step(0.1, downlink=Condensed()))
    before = 0
    tracemalloc.start()
    try:
        for client in range(num_clients):
            if client == 10:
                before = tracemalloc.get_traced_memory()[0]
            noise = np.random.default_rng(client).standard_normal(num_params).astype(np.float32)
            message = quantized(chosen, noise)
            book.state = take_message(chosen, book.state, client, message)
            del noise, message
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown / (num_clients - 10) <= most_bytes
