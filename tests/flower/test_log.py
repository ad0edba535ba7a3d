"""The model as a log, through ServerApp and ClientApp: who lacks something is sent it."""

import json

import numpy as np
import pytest

from aqg.core.downlink import Exact
from aqg.errors import ConfigError
from aqg.wire.entry import encode_log

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
