"""A world in simulated time in which everything goes wrong: the protocol's tester.

One server and a few clients exchange orders and replies over a network that loses, delays and
doubles them. Clients crash, are away for long, are wiped, and get old copies of their memory back;
some share their identity with a twin. The server crashes and comes back from a checkpoint, maybe an
old one. Orders and replies are tampered with and replayed. What must hold all the same is checked
at every event: no client trains on another model than the server's, and no mirror differs from the
server's without being noticed.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import numpy as np

from aqg.core.downlink import Exact, Public
from aqg.core.optimizers import make_optimizer
from aqg.core.server import Step
from aqg.core.step_sizes import Fixed
from aqg.core.types import FloatArray
from aqg.protocol.log import LostError, Publisher, Terms, follow, holding_of
from aqg.protocol.messages import ClientMirror, find_base, fingerprint
from aqg.protocol.server import MirrorBook
from aqg.wire.entry import encode_log

ROUND_SECONDS = 10.0
NUM_PARAMS = 6
STEP_SIZE = 0.05
SEED = 3
EXACT = Exact()
EMPTY_LOG = encode_log(1, [])


@dataclass
class Rates:
    """How likely each kind of trouble is, per occasion."""

    lose: float = 0.12
    delay: float = 0.15
    double: float = 0.1
    crash_before_saving: float = 0.05
    crash_before_replying: float = 0.08
    copy: float = 0.3
    restore: float = 0.15
    wipe: float = 0.05
    tamper: float = 0.1
    server_crash: float = 0.1
    old_checkpoint: float = 0.3
    leave: float = 0.06
    no_step: float = 0.08
    damage: float = 0.06
    rot: float = 0.03
    twin: float = 0.04
    log_rot: float = 0.02
    reweigh: float = 0.04


CALM = Rates(*([0.0] * 18))


def terms_of(recipe, num_params, seed=SEED):
    """Return what a book does not know of its orders."""
    mark = fingerprint(recipe, num_params, "float64", seed)
    about = {"recipe": "", "bits": 4, "max_staleness": 100, "seed": seed}
    return {"run": "r", "fingerprint": mark, **about}


class Disk(NamedTuple):
    """What a client has saved."""

    mirror: ClientMirror
    public: Public | None = None


class Truth(NamedTuple):
    """What an order is about, as the server has it."""

    params: FloatArray
    mirror: FloatArray
    public: Public | None


def same(one, other):
    """Whether two states are made of the very same objects."""
    return all(
        a is b or (isinstance(a, tuple) and same(a, b)) or (isinstance(a, int) and a == b)
        for a, b in zip(one, other, strict=True)
    )


class World:
    """Plays one schedule; raises AssertionError when something that must hold does not."""

    def __init__(
        self,
        seed,
        recipe,
        num_clients=2,
        find=find_base,
        book_type=MirrorBook,
        rates=None,
        downlink=EXACT,
        optimizer="sgd",
        follow_with=follow,
        publisher_type=Publisher,
        rule=None,
    ):
        self.rng = np.random.default_rng(seed)
        self.recipe, self.find, self.follow = recipe, find, follow_with
        self.about = terms_of(recipe, NUM_PARAMS)
        self.terms = Terms(recipe, NUM_PARAMS, "float64")
        self.rates = rates or Rates()
        weights = 0.5 + self.rng.random(num_clients)
        start = self.rng.standard_normal(NUM_PARAMS)
        made, rule = make_optimizer(optimizer), rule or Fixed()
        self.how = Step(STEP_SIZE, optimizer=made, rule=rule, downlink=downlink)
        first = MirrorBook.first(recipe, start, weights, self.how)
        self.book_type, self.publisher_type = book_type, publisher_type
        self.start = start
        log = None if first.publisher is None else first.publisher.state()
        self.book = self.make_book(first.state, weights, log)
        self.first_checkpoint = self.checkpoint()
        self.checkpoints = [self.first_checkpoint]
        self.incarnation = 1
        self.blank = Disk(ClientMirror.first(recipe, NUM_PARAMS, "float64"))
        self.disks = [self.blank] * num_clients
        self.twins = [self.blank] * num_clients
        self.copies = [[disk] for disk in self.disks]
        self.away_until = [0] * num_clients
        # Some have the starting model, some another one, some none.
        starts = [start, start, None, start + 1.0]
        self.starts = [self.one_of(starts) for _ in range(num_clients)]
        self.old_replies = [[] for _ in range(num_clients)]
        self.old_orders = []
        self.targets = self.rng.standard_normal((num_clients, NUM_PARAMS))
        self.pending = {}
        self.repeats = Counter()
        self.arrived = {}
        self.events = []
        self.now = 0.0
        self.serials = count()
        self.num_additions, self.largest = 1, 1.0
        self.seen = Counter()

    # The network.

    def happens(self, rate, what=None):
        """Draw whether something happens, and count it."""
        happens = bool(self.rng.random() < rate)
        if what is not None:
            self.seen[what] += happens
        return happens

    def later(self, seconds, action):
        heapq.heappush(self.events, (self.now + seconds, next(self.serials), action))

    def carry(self, action):
        """Deliver something: never, now, much later, or twice."""
        if self.happens(self.rates.lose, "lost"):
            return
        for _ in range(2 if self.happens(self.rates.double) else 1):
            slow = self.happens(self.rates.delay, "delayed")
            self.later(self.rng.uniform(8, 35) if slow else self.rng.uniform(0.1, 1.6), action)

    # The server.

    def run(self, num_rounds):
        """Run rounds with trouble, then two calm ones after which all must agree again."""
        for _ in range(num_rounds):
            self.round()
        self.rates = CALM
        self.events.clear()
        self.away_until = [0] * len(self.disks)
        for _ in range(2):
            self.round()
            self.check_agreement()

    def round(self):
        self.pending, self.arrived, self.repeats = {}, {}, Counter()
        if self.happens(self.rates.reweigh, "reweighed"):
            self.book.reweigh(0.5 + self.rng.random(len(self.disks)))
        state = self.book.state
        for client in range(len(self.disks)):
            if self.happens(self.rates.leave):
                self.away_until[client] = state.round + int(self.rng.integers(1, 9))
            if self.away_until[client] > state.round:
                self.seen["away"] += 1
            else:
                self.give_order(client)
        end = self.now + ROUND_SECONDS
        crash = self.now + self.rng.uniform(0, 12) if self.happens(self.rates.server_crash) else 1e9
        while self.events and self.events[0][0] <= min(end, crash):
            self.now, _, action = heapq.heappop(self.events)
            action()
        if crash <= end:
            self.now = crash
            self.crash_server()
            return
        self.now = end
        self.take_in()
        assert self.book.state.round == state.round
        if self.happens(self.rates.no_step, "no step"):
            self.book.skip_step()
        else:
            self.book.step()
        if self.happens(self.rates.log_rot):
            self.damage_log()
        self.checkpoints.append(self.checkpoint())
        for client in range(len(self.disks)):
            self.trouble_disk(client)

    def crash_server(self):
        self.seen["server crash"] += 1
        if self.happens(0.5):
            self.take_in()  # crashed after the replies were taken, before the checkpoint
        self.pending = {}
        self.incarnation += 1
        if self.happens(self.rates.old_checkpoint, "old checkpoint"):
            del self.checkpoints[int(self.rng.integers(-3, 0)) :]
        self.checkpoints = self.checkpoints or [self.first_checkpoint]
        self.book = self.make_book(*self.checkpoints[-1])

    def make_book(self, state, weights, log):
        publisher = None if log is None else self.publisher_type(self.start, log)
        return self.book_type(self.recipe, state, weights, self.how, publisher)

    def checkpoint(self):
        book, publisher = self.book, self.book.publisher
        return book.state, book.weights, publisher and publisher.state()

    def give_order(self, client):
        state = self.book.state
        order = self.book.order(client, incarnation=self.incarnation, **self.about)
        public = None
        if order.parcel is not None:
            public = state.public
            self.seen["snapshot"] += bool(order.snapshot)
            self.seen["entries"] += len(order.log) > len(EMPTY_LOG)
            if self.happens(self.rates.damage, "damaged"):
                order = self.damage(order)
            self.old_orders.append(order)
        truth = Truth(state.parameters.copy(), state.mirror(client).copy(), public)
        identifier = next(self.serials)
        self.pending[identifier] = (client, state.round)
        self.carry(lambda: self.obey(identifier, client, order, truth))

    def damage(self, order):
        """Return the order with entries that are damaged, or not those of its round."""
        other = self.one_of(self.old_orders or [order])
        match int(self.rng.integers(4)):
            case 0:
                return replace(order, log=self.flipped(order.log))
            case 1 if order.snapshot:
                return replace(order, snapshot=self.flipped(order.snapshot))
            case 2:
                return replace(order, log=other.log)
            case _:
                return replace(order, log=other.log, snapshot=other.snapshot)

    def damage_log(self):
        """Change a bit of an entry in the server's own memory."""
        entries = [] if self.book.publisher is None else self.book.publisher.entries
        if entries:
            place = int(self.rng.integers(len(entries)))
            entries[place] = self.flipped(entries[place])
            self.seen["rotten log"] += 1

    def one_of(self, things):
        return things[int(self.rng.integers(len(things)))]

    def flipped(self, data):
        changed = bytearray(data)
        changed[int(self.rng.integers(len(changed)))] ^= 1 << int(self.rng.integers(8))
        return bytes(changed)

    def hear(self, identifier, client, reply, mirror):
        if self.pending.get(identifier) != (client, self.book.state.round):
            self.seen["late"] += 1
            return
        del self.pending[identifier]
        self.book.note_holding(client, reply)
        if reply.lost:
            self.seen["lost model"] += 1
            if self.repeats[client] < 2:
                self.repeats[client] += 1
                self.give_order(client)
            return
        bad = None
        if self.happens(self.rates.tamper):
            bad = self.tamper(client, reply)
            self.seen["tampered"] += bad is not None
        self.arrived[client] = (reply if bad is None else bad, mirror, bad is not None)
        self.old_replies[client].append(reply)

    def tamper(self, client, reply):
        """Return a reply that must not be taken; None where there is no such thing to do."""
        old = [r for r in self.old_replies[client] if r.round != reply.round]
        match int(self.rng.integers(5)):
            case 0 if old:
                return self.one_of(old)
            case 1 if old:
                stolen = self.one_of(old)
                forged = replace(stolen, incarnation=reply.incarnation, round=reply.round)
                # A client that lies about its own past may continue it in any way that fits.
                held = self.book.entries[client].stamp
                fits = forged.base == held or (forged.restarted and forged.epoch > held.epoch)
                return None if fits or forged.stale else forged
            case 2 if len(reply.frame) > 1:
                return replace(reply, frame=self.flipped(reply.frame))
            case 3 if not reply.stale:
                return replace(reply, digest=bytes(4))
            case 4 if not reply.stale:
                return replace(reply, uploads=reply.uploads + 1)
        return None

    def take_in(self):
        for client, (reply, mirror, is_bad) in sorted(self.arrived.items()):
            before = self.book.state
            if reply.stale and not is_bad:
                self.seen["stale"] += 1
                continue
            taken = self.book.accept(client, reply, self.incarnation)
            if isinstance(taken, str):
                assert same(self.book.state, before), "a reply that was not taken changed something"
                self.seen["rejected"] += 1
            else:
                assert not is_bad, "a tampered reply was taken"
                assert np.array_equal(self.book.state.mirror(client), mirror), (
                    "the mirror is not the one of the client whose reply was taken"
                )
                self.seen["restarted"] += reply.restarted
                self.seen["rolled back"] += reply.rolled_back
                self.seen["taken"] += 1
            self.check_sum()

    # The clients.

    def obey(self, identifier, client, order, truth):
        disk = self.disks[client]

        def say(reply, mirror=truth.mirror):
            self.carry(lambda: self.hear(identifier, client, reply, mirror))

        base = self.find(self.recipe, disk.mirror, order, int(self.rng.integers(1000)))
        if base is None:
            say(order.stale_reply())
            return
        held = base.snapshot.state.track.position[0]
        assert base.restarted or np.array_equal(held, truth.mirror), (
            "a mirror that differs from the server's was not noticed at contact"
        )
        params, public = truth.params, None
        if order.parcel is not None:
            assert truth.public is not None

            def start():
                return self.starts[client]

            try:
                public = self.follow(self.terms, order.parcel, disk.public, start)
            except LostError as error:
                say(order.lost_reply(holding_of(self.terms, disk.public, start), str(error)))
                return
            assert is_equal(public, truth.public), "a client trains on another model"
            params = public.parameters
        noise = np.random.default_rng([order.round, client]).standard_normal(NUM_PARAMS)
        gradient = params - self.targets[client] + 0.3 * noise
        memory, reply = base.answer(self.recipe, order, gradient)
        if self.happens(self.rates.crash_before_saving, "crash"):
            return
        self.disks[client] = Disk(memory, public)
        if self.happens(self.rates.copy):
            self.copies[client].append(self.disks[client])
        if self.happens(self.rates.crash_before_replying, "crash"):
            return
        say(reply, memory.current.state.track.position[0])

    def trouble_disk(self, client):
        if self.happens(self.rates.restore, "restored"):
            self.disks[client] = self.one_of(self.copies[client][-3:])
        if self.happens(self.rates.wipe, "wiped"):
            self.disks[client] = self.blank
        if self.happens(self.rates.twin, "twin"):
            self.disks[client], self.twins[client] = self.twins[client], self.disks[client]
        public = self.disks[client].public
        if public is not None and self.happens(self.rates.rot, "rotten"):
            self.disks[client] = self.disks[client]._replace(public=self.rotten(public))

    def rotten(self, public):
        """Return a public model in which one number has changed, as it is read from disk."""
        names = [name for name in ("position", "velocity") if getattr(public.track, name).size]
        name = self.one_of(names)
        vector = getattr(public.track, name).copy()
        place = int(self.rng.integers(vector.size))
        vector[0, place] = np.nextafter(vector[0, place], np.inf)
        return public._replace(track=public.track._replace(**{name: vector}), mark=None)

    # What must hold.

    def check_sum(self):
        """The running sum is the sum of the mirrors, but for the rounding of each addition."""
        if not self.recipe.memory.keeps_mirror:
            return
        state = self.book.state
        positions = np.concatenate([peer.track.position for peer in state.peers])
        weighted = self.book.weights[:, np.newaxis] * positions
        self.num_additions += 2
        self.largest = max(self.largest, np.abs(weighted).sum(), np.abs(state.model.total).max())
        allowed = 4 * np.finfo(np.float64).eps * self.num_additions * self.largest
        error = np.abs(state.model.total - weighted.sum(axis=0)).max()
        assert error <= allowed, "the sum is not the sum of the mirrors"

    def check_agreement(self):
        publisher = self.book.publisher
        for client, (mirror, public) in enumerate(self.disks):
            assert mirror.current.stamp == self.book.entries[client].stamp, "no agreement"
            held = mirror.current.state.track.position[0]
            assert np.array_equal(held, self.book.state.mirror(client))
            if publisher is not None:
                assert public is not None, "no agreement"
                assert public.round == self.book.round - 1, "no agreement"
                assert publisher.positions[client] == public.round, "no agreement"


def is_equal(one, other):
    """Whether two public models are equal to the bit."""
    return (one.round, one.history) == (other.round, other.history) and all(
        mine.tobytes() == theirs.tobytes()
        for mine, theirs in zip(one.vectors, other.vectors, strict=True)
    )
