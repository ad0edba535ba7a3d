"""One share of the digits, behind a mod that does what the test orders, once."""

import os
import shutil
import time
from pathlib import Path

from flwr.app import ConfigRecord
from flwr.supernode.runtime import run_clientapp

from aqg.flower import make_client_app
from aqg.flower.demo import digits_task
from aqg.flower.envelope import RECORD, pack, unpack
from aqg.protocol.store import ClientStore

from tests.flower.own_messages import envelope_of, flipped, reply_in

BEFORE = ("backup", "restore", "wipe", "damage", "linger")
AFTER = ("announce", "corrupt", "drop", "delay", "replay")
FOREVER = 1e6
SHORTEST_UPLOAD = 10
"""A frame of fewer bytes moves no mirror."""


def misbehave(message, context, call_next):
    """Look for an order beside the state directory, and carry it out with the next upload."""
    is_order = message.metadata.message_type == "train" and unpack(message.content).parts
    if not is_order:  # the server evaluates, or asks a node to introduce itself
        return call_next(message, context)
    state = Path(str(context.node_config["aqg-state-dir"]))
    order = state.with_name(f"{state.name}.order")
    deed, _, argument = (order.read_text() if order.exists() else "").partition(" ")
    if deed == "away":
        stay_away(order, int(argument))
    if deed in BEFORE:
        os.unlink(order)
        prepare(deed, state, message)
    content = message.content
    reply = call_next(message, context)
    if deed == "twice":
        os.unlink(order)
        message.content = content
        again = call_next(message, context)
        assert reply_in(again).stale, "an order was obeyed twice"
    frame = b"" if reply.has_error() else reply_in(reply).frame
    earlier = state.with_name(f"{state.name}.earlier")
    if deed in AFTER and len(frame) >= SHORTEST_UPLOAD:
        os.unlink(order)
        reply = change_reply(deed, argument, reply, earlier)
    elif len(frame) >= SHORTEST_UPLOAD:
        keep(reply, earlier)
    return reply


def stay_away(order, rounds):
    """Lose so many orders: the handler never sees them."""
    if rounds == 0:
        os.unlink(order)
        return
    order.write_text(f"away {rounds - 1}")
    raise ConnectionError("the order is lost, as ordered")


def prepare(deed, state, message):
    """Do what happens to disks and to orders before a client sees them."""
    copy = state.with_name(f"{state.name}.backup")
    match deed:
        case "backup":
            shutil.copytree(state, copy)
        case "wipe":
            shutil.rmtree(state)
        case "restore":
            shutil.rmtree(state)
            shutil.copytree(copy, state)
        case "damage":
            damage_part(message)
        case "linger":  # with the entries read, and nothing saved
            ClientStore.save = lambda *_, **__: time.sleep(FOREVER)


def change_reply(deed, argument, reply, earlier):
    """Do to a reply what happens on networks."""
    match deed:
        case "drop":
            raise ConnectionError("the reply is dropped, as ordered")
        case "delay":
            time.sleep(float(argument))
        case "announce":  # the reply, without ever sending what is in it
            run_clientapp.push_objects = lambda *_, **__: time.sleep(FOREVER)
        case "corrupt":
            damage_part(reply)
        case "replay":
            reply.content[RECORD] = ConfigRecord.inflate(earlier.read_bytes())
    return reply


def keep(reply, path):
    """Write an upload down, for a later replay."""
    path.write_bytes(reply.content[RECORD].deflate())


def damage_part(message):
    """Flip a bit of the order or the reply in a message, in an envelope that is in order."""
    envelope = envelope_of(message)
    envelope.parts = [flipped(envelope.parts[0])]
    message.content[RECORD] = pack(envelope)


app = make_client_app(lambda context: digits_task(context.run_config, context), mods=[misbehave])
