"""The mirror protocol over thousands of schedules of trouble; the log, and what it keeps."""

import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg import DenseUpload, encode, make_recipe
from aqg.core.downlink import Condensed, Exact, Full
from aqg.core.optimizers import make_optimizer
from aqg.core.round import init_client, respond
from aqg.core.server import Step, take_message
from aqg.core.step_sizes import DistanceOverGradients
from aqg.core.types import from_arrays, to_arrays
from aqg.errors import MessageError, RunError, WireError
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
from aqg.protocol.messages import ClientMirror, Order, find_base, max_frame_bytes
from aqg.protocol.server import MirrorBook
from aqg.wire.entry import (
    decode_snapshot,
    encode_log,
    follow_log,
    log_overhead,
    log_rounds,
    log_since,
)

from tests.protocol.schedules import Rates, World, same, terms_of

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


SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@given(SIZES, st.integers(10, 300), st.randoms(use_true_random=False))
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
    with pytest.raises(LostError, match="round 6 is held here, which is later than"):
        follow(book.terms, old, held[-1], lambda: None)
    with pytest.raises(WireError, match="the log has rounds 1 to 5, not 7"):
        log_since(parcel.log, 7)


def test_a_snapshot_is_relative_to_a_start_that_a_client_has():
    book = Book.of("laq", Exact())
    book.pass_rounds(7)
    book.publisher.lost(1, holding_of(book.terms, None, lambda: book.start))
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


NUM_PARAMS = 8


DOWNLINKS = [Exact(), Condensed(), Full()]
OPTIMIZERS = ["sgd", "momentum", "adam", "sgd"]
RULES = {"auto": DistanceOverGradients()}
"""Of recipes whose steps set themselves."""


def play(num_schedules, recipe="laq", world=World, **options):
    """Play schedules, with all downlinks and optimizers in turn; return what happened in them."""
    seen = Counter()
    for seed in range(num_schedules):
        ways = {"downlink": DOWNLINKS[seed % 3]}
        ways["optimizer"] = OPTIMIZERS[seed // 3 % 4]
        ways["rule"] = RULES.get(recipe)
        played = world(seed, make_recipe(recipe), **(ways | options))
        played.run(num_rounds=24 if seed % 8 == 0 else 8)
        seen += played.seen
    return seen


@pytest.mark.parametrize("schedules", [100, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("recipe", "share"), [("laq", 0.3), ("lean", 0.3), ("gd", 0.05), ("onebit", 0.1), ("auto", 0.2)]
)
def test_no_schedule_makes_a_mismatch_go_unnoticed(recipe, share, schedules):
    seen = play(max(25, int(schedules * share)), recipe)
    # The schedules are worth something only if all of this happened in them.
    kinds = "lost delayed late stale restarted tampered rejected crash restored wiped taken"
    kinds += " away damaged rotten twin snapshot entries"
    more = ["rolled back", "server crash", "old checkpoint", "no step", "lost model"]
    more += ["rotten log", "reweighed"]
    assert all(seen[kind] for kind in [*kinds.split(), *more]), seen


def by_number_alone(recipe, mirror, order, draw):
    """Look for the server's state by epoch and number of uploads, as if these sufficed."""
    for snapshot in (mirror.current, mirror.before):
        if snapshot is not None and snapshot.stamp[:2] == order.stamp[:2]:
            order = replace(order, digest=snapshot.stamp.digest)
    return find_base(recipe, mirror, order, draw)


class LeavesOldMirrorsInItsSum(MirrorBook):
    def accept(self, client, reply, incarnation):
        old = self.state.mirror(client)
        taken = super().accept(client, reply, incarnation)
        if not isinstance(taken, str) and reply.restarted:
            total = self.state.model.total + self.weights[client] * old
            self.state = self.state._replace(model=self.state.model._replace(total=total))
        return taken


class TakesAnyReply(MirrorBook):
    def accept(self, client, reply, incarnation):
        stamp = self.entries[client].stamp
        believed = replace(reply, round=self.state.round, incarnation=incarnation)
        if not reply.restarted:
            mine = {"epoch": stamp.epoch, "uploads": stamp.uploads, "base_digest": stamp.digest}
            believed = replace(believed, **mine)
        return super().accept(client, believed, incarnation)


class ForgetsRoundsWithoutAStep(MirrorBook):
    def skip_step(self):
        publisher, self.publisher = self.publisher, None
        super().skip_step()
        self.publisher = publisher


class BelievesAnyRound(Publisher):
    def lost(self, client, holding):
        super().lost(client, holding)
        if self.first <= holding.round <= self.round:
            self.positions[client] = holding.round


class SendsWhatWasNoHelp(Publisher):
    def lost(self, client, holding):
        position = self.positions[client]
        super().lost(client, holding)
        place = holding.round - self.first
        is_known = 0 <= place < len(self._digests) and self._digests[place] == holding.digest
        if is_known and holding.round == position:
            self.positions[client] = position


class KeepsItsLogWhenItCrashes(World):
    def make_book(self, state, weights, log):
        book = super().make_book(state, weights, log)
        if hasattr(self, "book"):
            book.publisher = self.book.publisher
        return book


def follow_without_digests(terms, parcel, held, start):
    public = held or first_held(terms, start)
    try:
        if parcel.snapshot:
            public = decode_snapshot(parcel.snapshot, terms.blank(), start())
        if public is None:
            raise LostError("nothing is held")
        log = log_since(parcel.log, public.round)
        return follow_log(log, public, terms.recipe.movement)
    except WireError as error:
        raise LostError(str(error)) from error


def follow_with_digests_after_a_pause(terms, parcel, held, start):
    if held is None or parcel.round != held.round + 1 or parcel.snapshot:
        return follow(terms, parcel, held, start)
    return follow_without_digests(terms, parcel, held, start)  # one entry: what could go wrong


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"find": by_number_alone}, "not noticed at contact"),
        ({"book_type": LeavesOldMirrorsInItsSum}, "not the sum of the mirrors"),
        ({"book_type": TakesAnyReply}, "tampered"),
        ({"book_type": ForgetsRoundsWithoutAStep}, r"trains on another model|no agreement"),
        ({"publisher_type": BelievesAnyRound}, "no agreement"),
        ({"publisher_type": SendsWhatWasNoHelp, "rates": Rates(log_rot=0.3)}, "no agreement"),
        ({"world": KeepsItsLogWhenItCrashes}, r"trains on another model|no agreement"),
        ({"follow_with": follow_without_digests}, "trains on another model"),
        ({"follow_with": follow_with_digests_after_a_pause}, "trains on another model"),
    ],
    ids=lambda value: (
        "-".join(getattr(part, "__name__", "") for part in value.values())
        if isinstance(value, dict)
        else ""
    ),
)
def test_schedules_find_broken_protocols(broken, complaint):
    with pytest.raises(AssertionError, match=complaint):
        play(200, **broken)


class Pair:
    """One server and one client, in lockstep."""

    def __init__(self, recipe="laq"):
        self.recipe = make_recipe(recipe)
        self.book = MirrorBook.first(self.recipe, np.zeros(NUM_PARAMS), np.ones(1), Step(0.1))
        self.client = ClientMirror.first(self.recipe, NUM_PARAMS, "float64")
        self.rng = np.random.default_rng(5)

    def order(self, incarnation=1):
        return self.book.order(0, incarnation=incarnation, **terms_of(self.recipe, NUM_PARAMS, 0))

    def answer(self, order, gradient=None):
        base = find_base(self.recipe, self.client, order, draw=98)
        assert base is not None
        if gradient is None:
            gradient = self.rng.standard_normal(NUM_PARAMS)
        self.client, reply = base.answer(self.recipe, order, gradient)
        return reply

    def round(self):
        reply = self.answer(self.order())
        assert not isinstance(self.book.accept(0, reply, 1), str)
        self.book.step()
        return reply


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_restarted_server_gets_the_same_answer_again(is_silent):
    """What was answered is undone first, also where it moved no mirror."""
    pair = Pair()
    pair.round()
    known = pair.client.current.state.track.position[0]
    gradient = known if is_silent else np.arange(NUM_PARAMS) - 3.0
    lost = pair.answer(pair.order(), gradient)
    again = pair.answer(pair.order(incarnation=2), gradient)
    assert (again.frame, again.digest) == (lost.frame, lost.digest)
    assert again.rolled_back != is_silent
    assert pair.client.current.state.skipped_rounds == is_silent


def test_a_changed_bit_in_storage_is_found():
    pair = Pair()
    pair.round()
    snapshot = pair.client.current
    assert snapshot.is_intact
    track = snapshot.state.track
    mirror = track.position.copy()
    mirror[0, 3] = np.nextafter(mirror[0, 3], 1)
    directed = track._replace(direction=track.direction + np.int8(1))
    for changed in track._replace(position=mirror), directed:
        assert not snapshot._replace(state=snapshot.state._replace(track=changed)).is_intact


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"round": 9}, "round 9"),
        ({"incarnation": 9}, "incarnation 9"),
        ({"frame": bytes(max_frame_bytes(NUM_PARAMS) + 1)}, "are the most for 8 parameters"),
        ({"frame": b""}, "frame is empty"),
        ({"frame": b"\x20"}, "the client says"),
        ({"frame": b"garbage"}, "checksum"),
        ({"uploads": 7}, "the mirror is at 1 of 0"),
        ({"epoch": 7}, "the mirror is at 1 of 0"),
        ({"base_digest": bytes(4)}, "digest 0000"),
        ({"digest": bytes(4)}, "the client says 0000"),
        ({"restarted": True}, "upload 0 of an epoch after 0"),
        ({"restarted": True, "uploads": 0}, "upload 0 of an epoch after 0"),
        ({"restarted": True, "uploads": 0, "epoch": 5}, "the frame is for upload 0 of epoch 5"),
        ({"restarted": True, "uploads": 0, "epoch": 2**32}, "is for upload 0 of epoch 4294967296"),
        ({"restarted": True, "uploads": 0, "epoch": 2**32 + 1}, "4294967296 at the most"),
        ({"restarted": True, "uploads": 0, "epoch": 2**63 - 1}, "4294967296 at the most"),
    ],
)
def test_a_bad_reply_changes_nothing(change, complaint):
    pair = Pair()
    pair.round()
    good = pair.answer(pair.order())
    state = pair.book.state
    assert complaint in pair.book.accept(0, replace(good, **change), 1)
    assert same(pair.book.state, state)
    assert not isinstance(pair.book.accept(0, good, 1), str)
    assert "the mirror is at 2" in pair.book.accept(0, good, 1)  # not twice


def test_values_that_overflow_the_mirror_are_refused():
    recipe = make_recipe("lag")
    book = MirrorBook.first(recipe, np.zeros(NUM_PARAMS, np.float32), np.ones(1), Step(0.1))
    huge = np.full(NUM_PARAMS, 3e38, np.float32)
    pair = Pair("lag")
    frame = encode(DenseUpload(huge))
    digest = book.entries[0].stamp.digest
    reply = replace(pair.answer(pair.order()), frame=frame, base_digest=digest)
    assert "the client says" in book.accept(0, reply, 1)  # finite: only the digest is off
    track = book.state.peers[0].track._replace(position=np.full((1, NUM_PARAMS), 3e38, np.float32))
    peers = book.state.peers.replaced(0, book.state.peers[0]._replace(track=track))
    book.state = book.state._replace(peers=peers)
    assert "NaN or infinity" in book.accept(0, reply, 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"run": "../x"}, "letters and digits"),
        ({"dtype": "object"}, "must be float32 or float64"),
        ({"digest": b"short"}, "must be 4 bytes long"),
        ({"round": -1}, "round is -1"),
    ],
)
def test_a_bad_order_is_refused(change, complaint):
    order = Pair().order()
    assert Order.from_bytes(order.to_bytes()) == order
    with pytest.raises(MessageError, match=complaint):
        replace(order, **change)
