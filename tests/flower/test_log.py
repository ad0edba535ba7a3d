"""The model as a log, through ServerApp and ClientApp: who lacks something is sent it."""

import json
import tracemalloc

import numpy as np
import pytest

from aqg import make_recipe
from aqg.core.arrays import from_arrays, to_arrays
from aqg.core.downlink import Condensed, Exact
from aqg.core.optimizers import make_optimizer
from aqg.core.round import init_client, respond
from aqg.core.server import Step, take_message
from aqg.errors import ConfigError, RunError, WireError
from aqg.protocol.book import MirrorBook
from aqg.protocol.follower import (
    STATE_DIGEST_BYTES,
    LostError,
    Parcel,
    Terms,
    first_held,
    follow,
    holding_of,
    public_digest,
)
from aqg.protocol.log import LogState, Publisher
from aqg.wire.entry import encode_log, log_rounds, log_since

from tests.flower.federation import Federation, at, reference
from tests.flower.own_messages import change_order, flipped, order_in

SIZE = 400


def damage(message):
    log = order_in(message).log
    change_order(message, log=log[:2] + bytes([log[2] ^ 1]) + log[3:])


def leave_out_the_log(message):
    change_order(message, log=encode_log(3, []))


def put_foreign_entries(message):
    change_order(message, log=encode_log(2, [b"\x10"]))


def damage_digest(message):
    change_order(message, public=bytes(4))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (damage, ""),
        (leave_out_the_log, "the log begins with round 3, and round 2 is held here"),
        (put_foreign_entries, "the server says"),
        (damage_digest, "the server says"),
    ],
)
def test_entries_that_are_not_in_order_are_refused_by_name(tmp_path, change, complaint, caplog):
    clean = reference("qgd", 5, downlink=Exact()).parameters
    federation = Federation(tmp_path, rounds=5, round_timeout=30.0)
    changes = [change]
    federation.grid.deliver = at(3, 18, lambda order: changes and changes.pop()(order))
    assert np.array_equal(federation.run(), clean)  # nothing is lost
    assert federation.incidents("lost") == [(3, 1)]
    assert complaint in caplog.text
    assert federation.agree()


def test_a_node_that_never_follows_costs_its_update_only(tmp_path):
    federation = Federation(tmp_path, rounds=4, round_timeout=30.0)

    def strike(order):
        order.content["aqg"]["bytes"] = flipped(order.content["aqg"]["bytes"])

    federation.grid.deliver = at({1, 2, 3, 4}, 18, strike)
    federation.run()
    assert [row["widths"][1] for row in federation.rows()] == [-1] * 4
    assert all(row["stepped"] for row in federation.rows())
    assert federation.incidents("error") == [(k, 1) for k in (1, 2, 3, 4)]


def test_a_damaged_model_on_disk_is_not_used(tmp_path):
    clean = reference("qgd", 5, downlink=Exact()).parameters
    federation = Federation(tmp_path, rounds=5, round_timeout=30.0)
    files = []

    def rot(_):
        if not files:  # the second order of the round brings the whole model
            files.append(federation.copy_of(1) / "state.json")
            index = json.loads(files[0].read_text())
            cell = index["public"]["vectors"][0]
            cell["bytes"] = "0123" + cell["bytes"][4:]
            files[0].write_text(json.dumps(index))

    federation.grid.deliver = at(3, 18, rot)
    assert np.array_equal(federation.run(), clean)
    assert federation.incidents("lost") == [(3, 1)]
    assert federation.total("resyncs") == 0


def test_another_downlink_does_not_go_on_in_the_same_directory(tmp_path):
    federation = Federation(tmp_path, rounds=2)
    federation.run()
    federation.config["downlink"] = "full"
    with pytest.raises(ConfigError, match="a run with downlink exact, and downlink is full"):
        federation.run()


class Book:
    """A server whose only sender is a stream of noise, and clients that read its log."""

    def __init__(self, recipe, downlink, optimizer="sgd"):
        self.recipe = make_recipe(recipe)
        self.start = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)
        step = Step(0.1, optimizer=make_optimizer(optimizer), downlink=downlink)
        self.book = MirrorBook.first(self.recipe, self.start, np.ones(3), step)
        self.terms = Terms(self.recipe, SIZE, "float32")
        self.rng = np.random.default_rng(2)

    @property
    def publisher(self):
        assert self.book.publisher is not None
        return self.book.publisher

    @property
    def public(self):
        return self.book.public

    def step(self):
        """Take in one upload, or let a round pass without a step."""
        if self.book.round % 50 == 7:
            self.book.skip_step()
            return
        noise = self.rng.standard_normal(SIZE).astype(np.float32)
        upload = quantized(self.recipe, noise)
        self.book.state = take_message(self.recipe, self.book.state, 0, upload)
        self.book.step()

    def follow(self, client, held, has_start=True):
        parcel = self.book.parcel(client)
        assert parcel is not None
        public = follow(self.terms, parcel, held, lambda: self.start if has_start else None)
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
    book = Book(recipe, downlink, "momentum")
    held = [first_held(book.terms, lambda: book.start)] * 3
    for pause in (1, 10, 1000):
        for _ in range(pause):
            held[0] = book.follow(0, held[0])
            book.step()
        parcel = book.book.parcel(1)
        assert parcel is not None
        held[1] = book.follow(1, held[1])
        assert public_digest(held[1]) == public_digest(book.public)
        size = len(parcel.snapshot) + len(parcel.log)
        assert size < 4 * SIZE * (pause + 5)
        if pause == 1:
            assert not parcel.snapshot
            assert log_rounds(parcel.log) == range(book.book.round - 1, book.book.round)
        if pause == 1000:  # a thousand entries are longer than the model
            assert parcel.snapshot
            assert size < 20 * SIZE
    state = book.publisher.state()
    assert sum(map(len, state.entries)) <= 60 * SIZE, "the log outgrows a snapshot"
    assert len(state.digests) == len(state.entries) + 1
    assert np.array_equal(state.positions, [book.book.round - 1, book.book.round, 1])


@pytest.mark.parametrize(
    ("recipe", "downlink"), [("laq", Condensed()), ("onebit", Exact()), ("onebit", Condensed())]
)
def test_entries_that_a_client_has_are_left_out_of_account(recipe, downlink):
    book = Book(recipe, downlink)
    held = [first_held(book.terms, lambda: book.start)]
    for _ in range(5):
        book.step()
        parcel = book.book.parcel(0)  # no reply arrives: the server thinks that it holds round 1
        assert parcel is not None
        assert log_rounds(parcel.log).start == 1
        held.append(follow(book.terms, parcel, held[-1], lambda: None))
    assert public_digest(held[-1]) == book.publisher.digest
    old = Parcel(4, bytes(4), encode_log(1, book.publisher.state().entries[:3]))
    with pytest.raises(LostError, match="round 6 is held here, which is later than round 4"):
        follow(book.terms, old, held[-1], lambda: None)
    with pytest.raises(WireError, match="the log has rounds 1 to 5, not 7"):
        log_since(parcel.log, 7)


def test_only_what_has_the_digest_of_its_round_gets_entries():
    book = Book("laq", Exact())
    first = first_held(book.terms, lambda: book.start)
    assert first is not None
    for _ in range(4):
        book.step()
    held = book.follow(1, first)
    for _ in range(3):
        book.step()
    old = holding_of(book.terms, held, lambda: book.start)
    book.publisher.positions[1] = book.book.round
    book.publisher.lost(1, old)  # a restored backup
    assert book.publisher.positions[1] == old.round
    book.publisher.lost(1, old)  # it was sent entries from there, and they were no help
    assert book.publisher.positions[1] == 0
    moved = held.track._replace(position=held.track.position + 1)
    other = held._replace(track=moved)
    book.publisher.lost(1, holding_of(book.terms, other, lambda: book.start))
    assert book.publisher.positions[1] == 0
    relative = book.book.parcel(1)
    book.publisher.lost(1, holding_of(book.terms, None, lambda: None))
    absolute = book.book.parcel(1)
    assert relative is not None
    assert absolute is not None
    assert (relative.snapshot[1], absolute.snapshot[1]) == (1, 0)
    for parcel in (relative, absolute):
        public = follow(book.terms, parcel, None, lambda: book.start)
        assert public_digest(public) == book.publisher.digest


def test_the_log_comes_back_from_arrays():
    book = Book("laq", Exact())
    for _ in range(3):
        book.step()
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
