"""The mirror protocol alone, over thousands of schedules of trouble."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from aqg import DenseUpload, encode, make_recipe
from aqg.core.downlink import Condensed, Exact, Full
from aqg.core.server import Step
from aqg.core.step_sizes import DistanceOverGradients
from aqg.errors import MessageError, WireError
from aqg.protocol.log import LostError, Publisher, first_held, follow
from aqg.protocol.messages import ClientMirror, Order, find_base, max_frame_bytes
from aqg.protocol.server import MirrorBook
from aqg.wire.entry import decode_snapshot, follow_log, log_since

from tests.protocol.schedules import Rates, World, same, terms_of

SIZE = 8


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
        self.book = MirrorBook.first(self.recipe, np.zeros(SIZE), np.ones(1), Step(0.1))
        self.client = ClientMirror.first(self.recipe, SIZE, "float64")
        self.rng = np.random.default_rng(5)

    def order(self, incarnation=1):
        return self.book.order(0, incarnation=incarnation, **terms_of(self.recipe, SIZE, 0))

    def answer(self, order, gradient=None):
        base = find_base(self.recipe, self.client, order, draw=98)
        assert base is not None
        if gradient is None:
            gradient = self.rng.standard_normal(SIZE)
        self.client, reply = base.answer(self.recipe, order, gradient)
        return reply

    def round(self):
        reply = self.answer(self.order())
        assert not isinstance(self.book.accept(0, reply, 1), str)
        self.book.step()
        return reply


def test_a_lost_upload_is_rolled_back_with_all_that_belongs_to_it():
    pair = Pair("onebit")
    pair.round()
    kept = pair.client.current
    pair.answer(pair.order())  # never arrives
    residual = kept.state.stages["feedback"]["residual"]
    assert not np.array_equal(pair.client.current.state.stages["feedback"]["residual"], residual)
    pair.book.step()
    base = find_base(pair.recipe, pair.client, pair.order(), draw=98)
    assert base is not None
    assert base.rolled_back
    assert base.snapshot is kept
    assert base.snapshot.state.stages["feedback"]["residual"] is residual


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_restarted_server_gets_the_same_answer_again(is_silent):
    """What was answered is undone first, also where it moved no mirror."""
    pair = Pair()
    pair.round()
    known = pair.client.current.state.track.position[0]
    gradient = known if is_silent else np.arange(SIZE) - 3.0
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
    for changed in (
        track._replace(position=mirror),
        track._replace(direction=track.direction + np.int8(1)),
    ):
        assert not snapshot._replace(state=snapshot.state._replace(track=changed)).is_intact


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"round": 9}, "round 9"),
        ({"incarnation": 9}, "incarnation 9"),
        ({"frame": bytes(max_frame_bytes(SIZE) + 1)}, "are the most for 8 parameters"),
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
    book = MirrorBook.first(recipe, np.zeros(SIZE, np.float32), np.ones(1), Step(0.1))
    huge = np.full(SIZE, 3e38, np.float32)
    pair = Pair("lag")
    frame = encode(DenseUpload(huge))
    reply = replace(
        pair.answer(pair.order()), frame=frame, base_digest=book.entries[0].stamp.digest
    )
    assert "the client says" in book.accept(0, reply, 1)  # finite: only the digest is off
    track = book.state.peers[0].track._replace(position=np.full((1, SIZE), 3e38, np.float32))
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
