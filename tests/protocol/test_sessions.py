"""Sessions: bytes in, bytes out, and everything that can go wrong between them."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from aqg import make_recipe
from aqg.core.downlink import make_downlink
from aqg.errors import ConfigError, MessageError, RunError, WireError
from aqg.protocol import ClientSession, ServerSession
from aqg.protocol.messages import Order, Reply
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import LocalTraining, Training
from aqg.wire.entry import SNAPSHOT_MARK

from tests.problems import soak, tiny_problem

NUM_PARAMS = 6
TARGETS = np.random.default_rng(5).standard_normal((3, NUM_PARAMS))
OPTIMUM = TARGETS.mean(axis=0)
ZEROS = np.zeros(NUM_PARAMS)


def train_of(client):
    return lambda model, _round: model - TARGETS[client]


def make_server(path=None, parameters=ZEROS, **options):
    options = {"recipe": "lean", "step_size": 0.1} | options
    return ServerSession(parameters, 3, path=path, **options)


def whole_order(server, client):
    """Return an order that can be read by itself, as a client gets it that has said nothing yet."""
    server._informed.discard(client)
    return Order.from_bytes(server.order(client))


def read_reply(client, order, m=0):
    return Reply.from_bytes(client.answer(order.to_bytes(), train_of(m)), order.stamp)


def exchange(server, client, number=0, train=None):
    return server.take(number, client.answer(server.order(number), train or train_of(number)))


def run(server, clients, rounds, train=train_of):
    for _ in range(rounds):
        for number, client in enumerate(clients):
            receipt = exchange(server, client, number, train(number))
            if receipt.wants_order:
                receipt = exchange(server, client, number, train(number))
            assert receipt.is_taken, receipt.problem
        server.step()


def error(server):
    return np.abs(server.parameters - OPTIMUM).max()


PAIRS = [("lean", "exact"), ("stc:keep=0.5", "exact"), soak("gd", "condensed")]
PAIRS += [("auto", "condensed"), ("qsgd", "condensed")]


@pytest.mark.parametrize(("recipe", "downlink"), PAIRS)
def test_sessions_end_with_the_simulators_model(recipe, downlink):
    """As Flower does, in `tests/flower/test_apps.py`."""
    problem, local = tiny_problem(num_clients=3, unequal=True), LocalTraining(batch_size=2, steps=3)

    def train_as(m):
        def train(params, number):
            samples = problem.clients[m]
            return local.update(problem.objective, params, *samples, (0, m, number))[1]

        return train

    options = {"recipe": recipe, "step_size": 0.1, "downlink": downlink}
    server = ServerSession(problem.initial_params, 3, **options)
    run(server, [ClientSession() for _ in range(3)], 12, train_as)
    training = Training(local=local, downlink=make_downlink(downlink))
    simulation = ReferenceSimulation(problem, make_recipe(recipe), 0.1, seed=0, training=training)
    for _ in range(12):
        simulation.run_round(evaluate=False)
    assert np.array_equal(server.parameters, simulation.parameters)


def test_exact_gradients_are_sent_as_lean_does_and_others_leave_no_trace(tmp_path):
    """The server says which: clients need no setting."""
    replies = {}
    for recipe, exact in (("lean:widest=3", True), ("auto", True), ("auto", False)):
        server = make_server(recipe=recipe, exact=exact, sampled=0.5)
        clients = [ClientSession(tmp_path / recipe / f"{exact}-{m}") for m in range(3)]
        run(server, clients, 5)
        order = whole_order(server, 0)
        replies[recipe, exact] = read_reply(clients[0], order).frame
        assert order.updates == ("exact" if exact else "sampled")
    assert replies["auto", True] == replies["lean:widest=3", True]
    fresh = ClientSession()  # a new disk: once it has the model, it sends what the old one did
    assert server.take(0, fresh.answer(order.to_bytes(), train_of(0))).wants_order
    reply = read_reply(fresh, whole_order(server, 0))
    assert reply.frame == replies["auto", False] != b""


@pytest.mark.parametrize(("recipe", "bound"), [("qgd", 0.02), ("ef21", 0.5), ("onebit", 0.5)])
def test_a_lost_reply_is_rolled_back(tmp_path, recipe, bound):
    """With all that belongs to it: the same model as where that client was away in that round."""
    models = []
    for loses in (False, True):
        server = make_server(recipe=recipe)
        clients = [ClientSession(tmp_path / f"{loses}-{m}") for m in range(3)]
        run(server, clients, 3)
        if loses:
            clients[0].answer(server.order(0), train_of(0))  # and the reply is lost
        for m in (1, 2):
            exchange(server, clients[m], m)
        server.step()
        if loses:
            assert read_reply(clients[0], whole_order(server, 0)).rolled_back
        run(server, clients, 25)
        models.append(server.parameters)
    assert np.array_equal(*models)
    assert error(server) < bound


def test_the_same_order_gets_the_same_reply(tmp_path):
    server, trained = make_server(), []

    def train(model, number):
        trained.append(number)
        return np.random.default_rng().standard_normal(NUM_PARAMS)

    order = server.order(0)
    first = ClientSession(tmp_path).answer(order, train)
    again = ClientSession(tmp_path).answer(order, train)  # after a crash that lost the reply
    assert first == again
    assert trained == [1]
    assert server.take(0, first).is_taken
    assert "taken in round 1 already" in server.take(0, again).problem
    server.step()
    assert "round 1" in server.take(0, first).problem
    later = server.order(0)
    ClientSession(tmp_path).answer(later, train)
    assert read_reply(ClientSession(tmp_path), Order.from_bytes(order)).stale


def test_a_server_goes_on_from_its_directory(tmp_path):
    whole = make_server()
    run(whole, [ClientSession() for _ in range(3)], 40)
    clients = [ClientSession() for _ in range(3)]
    for _ in range(4):
        server = make_server(tmp_path)
        run(server, clients, 10)
        clients[0].answer(server.order(0), train_of(0))  # the round in flight is lost
    assert server.round == 41
    assert np.array_equal(server.parameters, whole.parameters)


def test_a_server_may_go_on_from_an_old_copy(tmp_path):
    clients = [ClientSession() for _ in range(3)]
    server = make_server(tmp_path / "now")
    run(server, clients, 5)
    shutil.copytree(tmp_path / "now", tmp_path / "old")
    run(server, clients, 7)
    again = make_server(tmp_path / "old")
    assert again.round == 6
    run(again, clients, 60)
    assert error(again) < 0.02


def test_a_session_goes_on_that_has_heard_of_some_clients_only(tmp_path):
    options = {"recipe": "lean", "exact": True}
    server, client = make_server(tmp_path, **options), ClientSession()
    for _ in range(3):
        assert exchange(server, client, 2).is_taken
        server.step()
    again = make_server(tmp_path, **options)
    assert again.parameters.tobytes() == server.parameters.tobytes()
    reply = read_reply(client, whole_order(again, 2), 2)
    assert (reply.restarted, reply.rolled_back, reply.lost) == (False, False, "")


@pytest.mark.parametrize("seed", [4, *map(soak, (0, 1, 2, 3, 5))])
def test_everything_goes_wrong_at_once(tmp_path, seed):
    """Lost, doubled, late and damaged messages, old backups, restarts: all is well in the end."""
    rng = np.random.default_rng(seed)
    recipe = ["lean", "auto", "gd"][seed % 3]
    start = np.zeros(NUM_PARAMS) if seed % 2 else None
    options = {"recipe": recipe, "start": "digest", "exact": seed < 3}
    server = make_server(tmp_path / "server", **options)
    paths = [tmp_path / f"client-{m}" for m in range(3)]
    late = []

    def session(m):
        return ClientSession(paths[m], start=start)

    for _ in range(20):
        if rng.random() < 0.1:
            server = make_server(tmp_path / "server", **options)
        for m in rng.permutation(3).tolist():
            if paths[m].exists() and rng.random() < 0.1:
                shutil.copytree(paths[m], tmp_path / f"copy-{m}", dirs_exist_ok=True)
            if (tmp_path / f"copy-{m}").exists() and rng.random() < 0.1:
                shutil.rmtree(paths[m], ignore_errors=True)
                shutil.copytree(tmp_path / f"copy-{m}", paths[m])
            if rng.random() < 0.05:
                shutil.rmtree(paths[m], ignore_errors=True)
            if rng.random() < 0.15:
                continue  # the order is lost
            order = server.order(m)
            reply = session(m).answer(order, train_of(m))
            if rng.random() < 0.1:
                session(m).answer(order, train_of(m))
            if rng.random() < 0.15:
                late.append((m, reply))
                continue
            if rng.random() < 0.1:
                damaged = bytearray(reply)
                damaged[rng.integers(len(reply))] ^= 1 << rng.integers(8)
                assert not server.take(m, bytes(damaged)).is_taken
            server.take(m, reply)
            if rng.random() < 0.1:
                assert not server.take(m, reply).is_taken
        for m, reply in late:
            server.take(m, reply)
        late = late[-3:]
        server.step()
    run(server, [session(m) for m in range(3)], 25)
    assert error(server) < (0.8 if recipe == "auto" else 0.05)
    for m in range(3):  # and both ends hold the same of each other
        reply = read_reply(session(m), whole_order(server, m), m)
        assert (reply.restarted, reply.rolled_back, reply.lost) == (False, False, "")


def test_bad_orders_and_replies_change_nothing(tmp_path):
    server, client = make_server(), ClientSession(tmp_path)
    order = server.order(0)
    other = replace(Order.from_bytes(order), fingerprint=bytes(16)).to_bytes()
    for bad, kind, complaint in (
        (order[:40] + b"\0\0" + order[42:], WireError, "checksum"),
        (b"", WireError, "too few"),
        (client.answer(order, train_of(1)), WireError, "does not begin the order"),
        (other, ConfigError, "same version"),
    ):
        with pytest.raises(kind, match=complaint):
            client.answer(bad, train_of(0))
    with pytest.raises(ConfigError, match="do not agree"):
        ClientSession(recipe=make_recipe("stc")).answer(order, train_of(0))
    reply = ClientSession().answer(order, train_of(0))
    read = Reply.from_bytes(reply, Order.from_bytes(order).stamp)
    for bad, complaint in (
        *((no_reply, "it must be bytes") for no_reply in (None, "reply", 3, [1])),
        (bytes(10_000), "10000 bytes"),
        (replace(read, digest=bytes(4)).to_bytes(), "digest"),
        (replace(read, epoch=3).to_bytes(), "epoch"),
    ):
        assert complaint in server.take(0, bad).problem
    with pytest.raises(MessageError, match="client is 3"):
        server.take(3, reply)
    assert server.answered == frozenset()
    assert server.take(0, reply).is_taken
    assert server.answered == {0}


def test_another_session_in_the_directory(tmp_path):
    make_server(tmp_path)
    with pytest.raises(RunError, match="another model, recipe"):
        make_server(tmp_path, recipe="auto")
    (tmp_path / "session.npz").write_bytes(b"nothing")
    with pytest.raises(RunError, match="damaged"):
        make_server(tmp_path)


def test_adaptive_steps_deliver_a_mean_over_the_last_models():
    server = ServerSession(np.zeros(4, np.float32), 1, recipe="gd", step_size=0.5, step="dog")
    fixed = ServerSession(np.zeros(4, np.float32), 1, recipe="gd", step_size=0.5)
    for session in (server, fixed):
        client = ClientSession()
        for _ in range(6):
            exchange(session, client, 0, lambda model, _round: model - 1.0)
            session.step()
    assert np.array_equal(fixed.averaged, fixed.parameters)
    assert not np.array_equal(server.averaged, server.parameters)
    assert np.abs(server.averaged - 1.0).max() < 1.0


LAYOUT = (("weight", (40, 30)), ("bias", (40,)))


@pytest.mark.parametrize("start", ["auto", "rounded", "exact"])
def test_a_first_model_travels_in_few_bytes(tmp_path, start):
    """Also to a client that is new in a later round, and from a server that was started again."""
    given = np.random.default_rng(0).uniform(-0.2, 0.2, 1240).astype(np.float32)
    given[1200:] = 0

    def make():
        options = {"recipe": "stc", "start": start, "layout": LAYOUT, "sampled": 0.5}
        return ServerSession(given, 3, path=tmp_path, **options)

    def train(model, _round):
        seen.append(model)
        return model - 1

    server, clients, seen, sizes = make(), [ClientSession() for _ in range(3)], [], []
    first = server.parameters.copy()
    for number in range(6):
        if number == 3:
            server = make()
        for m in (0, 1, 2) if number == 5 else (0, 1):
            order = server.order(m)
            sizes.append(len(order))
            assert server.take(m, clients[m].answer(order, train)).is_taken
            assert seen[-1].tobytes() == server.parameters.tobytes()
        server.step()
    assert np.abs(first - given).max() <= {"auto": 0.4, "rounded": 1e-3, "exact": 0}[start]
    assert (first == given).all() == (start == "exact")
    most = {"auto": 140, "rounded": 1500, "exact": 4800}[start]
    assert most / 4 < sizes[0] < most
    assert sizes[-1] < most + sum(sizes[2:8:2]) + 200


def test_a_client_that_cannot_use_a_first_model_gets_a_snapshot():
    server = ServerSession(np.full(8, 0.5), 1, recipe="gd", start="seed")
    order = whole_order(server, 0)
    broken = replace(order, snapshot=order.snapshot[:-1] + b"\0").to_bytes()
    client = ClientSession()
    receipt = server.take(0, client.answer(broken, lambda model, _round: model))
    assert receipt.wants_order
    assert "checksum of the first model" in receipt.problem
    order = whole_order(server, 0)
    assert order.snapshot[0] == SNAPSHOT_MARK
    assert server.take(0, client.answer(order.to_bytes(), lambda model, _round: model)).is_taken


@pytest.mark.parametrize("recipe", ["auto", "qsgd"])
def test_clients_may_hold_nothing_between_rounds(recipe):
    """A phone that appears once answers like one that has been there all the time."""
    options = {"recipe": recipe, "layout": LAYOUT, "sampled": 0.5, "seed": 3}
    given = np.random.default_rng(0).uniform(-0.2, 0.2, 1240).astype(np.float32)
    servers = [ServerSession(given, 2, memory=memory, **options) for memory in ("model", "none")]
    clients = [ClientSession(), ClientSession()]
    sizes = [], []
    for number in range(12):
        for server, sized in zip(servers, sizes, strict=True):
            for m in (0, 1):
                keeps = server is servers[0]
                client = clients[m] if keeps else ClientSession()
                order = server.order(m)
                sized.append(len(order))
                made = np.random.default_rng((number, m)).random(len(given))
                reply = client.answer(order, lambda model, _round, made=made: 0.1 * (model + made))
                assert server.take(m, reply).is_taken
            server.step()
    assert servers[0].parameters.tobytes() == servers[1].parameters.tobytes()
    assert whole_order(ServerSession(given, 2, memory="none"), 0).updates == "sampled"
    assert max(sizes[0][2:]) < min(sizes[1][4:])


def test_heads_are_short():
    """Once a client has answered: what an order and its reply have beside log and frame."""
    server, client, sizes = make_server(recipe="auto"), ClientSession(), []
    for _ in range(5):
        known = list(client._terms.values())
        order = server.order(0)
        reply = client.answer(order, train_of(0))
        assert server.take(0, reply).is_taken
        server.step()
        if known:
            read = Order.from_bytes(order, known)
            frame = Reply.from_bytes(reply, read.stamp).frame
            sizes.append(len(order) - len(read.log) + len(reply) - len(frame))
    assert max(sizes) <= 40
