"""What goes wrong between our own server and its clients, and what it costs them."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message

from aqg.errors import ConfigError
from aqg.flower import make_client_app
from aqg.wire.entry import encode_log

from tests.flower.federation import LOST, Federation, at, reference, round_of, task_of
from tests.flower.memory_grid import on_the_wire
from tests.flower.own_messages import (
    change_order,
    change_reply,
    envelope_of,
    flipped,
    order_in,
    parts_of,
    put,
    reply_in,
)

LOSES_AN_UPLOAD = {"missing": [(3, 1)], "rollback": [(4, 1)]}
REJECTED = {"rejected": [(3, 1)], "rollback": [(4, 1)]}
SENT_AGAIN = {"lost": [(3, 1)]}


def replied(act):
    """Return a fault: something happens to client 1's reply of round 3."""

    def begin(federation):
        federation.grid.answer = at(3, 18, act)

    return begin


def ordered(act, rounds=3):
    """Return a fault: something happens to the first order of some rounds that client 1 is sent."""

    def begin(federation):
        left = {rounds} if isinstance(rounds, int) else set(rounds)

        def once(message):
            if round_of(message) in left:
                left.remove(round_of(message))
                return act(federation, message)
            return message

        federation.grid.deliver = at(set(left), 18, once)

    return begin


def other_task(train):
    """Return tasks whose training goes through a function, which is given theirs."""

    def make(context):
        task = task_of(context)
        return replace(task, train=lambda *given: train(task.train, *given))

    return make


def trained(spoil):
    """Return a fault: something happens to what client 1 makes in round 3."""

    def train(train, params, number, key):
        loss, gradient = train(params, number, key)
        return loss, spoil(gradient) if (number, key[1]) == (3, 1) else gradient

    def begin(federation):
        federation.grid.client_app = make_client_app(other_task(train))

    return begin


def late_and_twice(federation):
    held = []

    def delay(node, reply):
        if round_of(reply) == 3 and node == 18:
            held.append(reply)
            return None
        if round_of(reply) == 4 and node == 11:
            federation.grid.replies += [*held, reply]  # one too late, one of two alike
        return reply

    federation.grid.answer = delay


def forged(federation):
    """Replies to nothing, and from nobody."""

    def forge(node, reply):
        if round_of(reply) == 3:
            stranger = Message(reply.content, reply_to=reply)
            stranger.metadata.__dict__["_reply_to_message_id"] = "message-0"
            federation.grid.extra.append(stranger)
        return reply

    federation.grid.answer = forge


def of_another_version(reply):
    envelope = envelope_of(reply)
    envelope.version, envelope.says_version = "0.0.9", True
    reply.content["aqg"] = envelope.pack()


def raises(_gradient):
    raise RuntimeError("out of memory")


def with_nan(gradient):
    return np.where(np.arange(len(gradient)) < 2, np.nan, gradient)


def in_context(federation):
    federation.config["client-state-dir"] = "context"
    restarted(federation)


restarted = ordered(lambda federation, _: federation.grid.restart_node(18), 4)


def under_a_new_id(federation, _):
    federation.grid.restart_node(18, new_id=99)
    return LOST


def rot(find, place):
    """Return what changes a vector on client 1's disk, or leaves no file that can be read."""

    def act(federation, message):
        file = find(federation) / "state.json"
        index = json.loads(file.read_text())
        cell = index
        for key in place:
            cell = cell[key]
        cell["bytes"] = "0123" + cell["bytes"][4:]
        file.write_text(json.dumps(index) if round_of(message) == 3 else "{")

    return act


rotten_mirror = rot(lambda f: f.mirror_of(1), ("current", "arrays", "track/position"))
rotten_copy = rot(lambda f: f.copy_of(1), ("public", "vectors", 0))


def changed(**fields):
    """Return what changes fields of an order, made by functions of it, with checksums that fit."""
    return lambda _, order: change_order(
        order, **{name: make(order_in(order)) for name, make in fields.items()}
    )


def strike(_, order):
    order.content["aqg"]["bytes"] = flipped(order.content["aqg"]["bytes"])


STRANGERS = {50: {"partition-id": 1}, 51: {"partition-id": 7}, 52: {}}


def strangers(federation):
    federation.grid.deliver = at(2, 11, lambda _: federation.grid.node_configs.update(STRANGERS))


def unpatient(federation):
    """One that is to forget runs at once, until somebody sees it."""
    grid = federation.grid
    grid.node_configs[18]["aqg-state-days"] = 0
    grid.deliver = at(2, 18, lambda _: grid.contexts[18].node_config.pop("aqg-state-days"))


NO_ENTRIES, FOREIGN = encode_log(3, []), encode_log(2, [b"\x10"])
TEXT, FOUR_ERRORS = ConfigRecord({"bytes": "nothing"}), {"error": [(k, 1) for k in range(1, 5)]}
FAULTS = {
    "a lost reply": (replied(lambda _: LOST), LOSES_AN_UPLOAD, ""),
    "more nodes that claim a partition": (
        strangers,
        {"refused": [(3, -1)] * 3},
        "node 50 reports partition 1, which is node 18|node 51 reports partition 7; 0 to 2",
    ),
    "a node that keeps nothing": (unpatient, {"error": [(1, 1)]}, "aqg-state-days is 0; it must"),
    "a late reply and a second one": (late_and_twice, LOSES_AN_UPLOAD, ""),
    "forged replies": (forged, {}, ""),
    "a damaged frame": (
        replied(lambda reply: change_reply(reply, frame=flipped(reply_in(reply).frame))),
        REJECTED,
        "",
    ),
    "another round": (replied(lambda reply: change_reply(reply, round=1)), REJECTED, "version 1"),
    "no envelope": (replied(lambda reply: reply.content.update(aqg=TEXT)), REJECTED, "not bytes"),
    "another version": (replied(of_another_version), REJECTED, "aqg 0.0.9"),
    "a client that raises": (trained(raises), {"error": [(3, 1)]}, "out of memory"),
    "a gradient with NaN": (trained(with_nan), {"fault": [(3, 1)]}, "holds NaN or infinity"),
    "a restarted node with its state": (restarted, {}, ""),
    "a restarted node without": (in_context, {"resync": [(4, 1)], "lost": [(4, 1)]}, ""),
    "a node under a new id": (ordered(under_a_new_id), {"missing": [(3, 1)]}, ""),
    "a rotten mirror": (ordered(rotten_mirror, {3, 4}), {"resync": [(3, 1), (4, 1)]}, "from zero"),
    "a damaged model on disk": (ordered(rotten_copy), SENT_AGAIN, ""),
    "a damaged log": (ordered(changed(log=lambda order: flipped(order.log))), SENT_AGAIN, ""),
    "no log": (ordered(changed(log=lambda _: NO_ENTRIES)), SENT_AGAIN, "and round 2 is held here"),
    "foreign entries": (ordered(changed(log=lambda _: FOREIGN)), SENT_AGAIN, "the server says"),
    "a wrong digest": (ordered(changed(public=lambda _: bytes(4))), SENT_AGAIN, "the server says"),
    "a damaged order": (
        ordered(lambda _, order: put(order, flipped(parts_of(order)[0]))),
        SENT_AGAIN,
        "terms of the run are not known",
    ),
    "an order delivered twice": (
        ordered(lambda f, order: f.grid.call(18, on_the_wire(order))),
        REJECTED,
        "it has answered a later order already",
    ),
    "struck orders": (ordered(strike, range(1, 5)), FOUR_ERRORS, "checksum of the envelope is"),
}


@pytest.mark.parametrize(("begin", "incidents", "says"), FAULTS.values(), ids=FAULTS)
def test_a_fault_costs_one_client_its_update_at_most(tmp_path, caplog, begin, incidents, says):
    """It is counted and named, others go on, and afterwards both sides hold the same again."""
    patience = 1.0 if "missing" in incidents else 30.0
    federation = Federation(tmp_path, round_timeout=patience)
    begin(federation)
    final = federation.run()
    assert federation.incidents() == incidents
    text = caplog.text + "".join(federation.texts())
    assert all(part in text for part in says.split("|"))
    rows = federation.rows()
    assert all(row["stepped"] for row in rows)
    costly = {place for kind in ("missing", "rejected", "fault", "error")
              for place in incidents.get(kind, [])}  # fmt: skip
    without = [(row["round"], c) for row in rows for c, w in enumerate(row["widths"]) if w == -1]
    assert sorted(costly) == without
    named = {one["node"] for row in rows for one in row.get("incidents", [])}
    assert named <= {18, 99} or named == STRANGERS.keys()
    losses = [row["loss"] for row in rows]
    assert losses[-1] < losses[2] < losses[0]
    if set(incidents) <= {"lost", "refused"}:  # no update was
        assert np.array_equal(final, reference("qgd", 8).parameters)
    if federation.config["client-state-dir"] != "context":
        assert federation.agree()


@pytest.mark.parametrize("downlink", ["exact", "condensed"])
def test_a_wiped_node_starts_again_and_a_restored_one_too(tmp_path, downlink):
    """What it lacks is sent in the same round."""
    federation = Federation(tmp_path, rounds=9, downlink=downlink, round_timeout=30.0)
    state, copy = federation.place_of(1), tmp_path / "copy"
    troubles = {
        3: lambda: shutil.copytree(state, copy),
        5: lambda: shutil.rmtree(state),
        7: lambda: (shutil.rmtree(state), shutil.copytree(copy, state)),
    }
    ordered(lambda _, message: troubles[round_of(message)]() and None, troubles)(federation)
    federation.run()
    assert federation.incidents() == {kind: [(5, 1), (7, 1)] for kind in ("lost", "resync")}
    assert all(width >= 0 for row in federation.rows() for width in row["widths"])
    assert federation.agree()
    losses = [row["loss"] for row in federation.rows()]
    assert losses == sorted(losses, reverse=True)


def test_another_run_does_not_go_on_in_the_same_directory(tmp_path):
    federation = Federation(tmp_path, rounds=2)
    federation.run()
    for changes, complaint in (
        ({"downlink": "full"}, "a run with downlink exact, and downlink is full"),
        ({"downlink": "exact", "recipe": "laq"}, "another recipe, seed or model"),
        ({"recipe": "qgd", "num-clients": 4}, "with num-clients 3, and num-clients is 4"),
    ):
        federation.config |= changes
        with pytest.raises(ConfigError, match=complaint):
            federation.run()
