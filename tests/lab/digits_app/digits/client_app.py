"""One share of the digits, behind a mod that does what the test orders, once."""

import os
import time
from pathlib import Path

from flwr.supernode.runtime import run_clientapp

from aqg.flower import make_client_app
from aqg.flower.demo import digits_task
from aqg.protocol.store import ClientStore

from tests.flower.own_messages import parts_of, reply_in

FOREVER = 1e6
SHORTEST_UPLOAD = 10
"""A frame of fewer bytes moves no mirror."""


def misbehave(message, context, call_next):
    """Look for an order beside the state directory, and carry it out with the next upload."""
    is_order = message.metadata.message_type == "train" and parts_of(message)
    if not is_order:  # the server evaluates, or asks a node to introduce itself
        return call_next(message, context)
    state = Path(str(context.node_config["aqg-state-dir"]))
    order = state.with_name(f"{state.name}.order")
    deed, _, argument = (order.read_text() if order.exists() else "").partition(" ")
    if deed == "linger":  # with the entries read, and nothing saved
        os.unlink(order)
        ClientStore.save = lambda *_, **__: time.sleep(FOREVER)
    reply = call_next(message, context)
    frame = b"" if reply.has_error() else reply_in(reply).frame
    if len(frame) < SHORTEST_UPLOAD or not deed:
        return reply
    os.unlink(order)
    match deed:
        case "drop":
            raise ConnectionError("the reply is dropped, as ordered")
        case "delay":
            time.sleep(float(argument))
        case "announce":  # the reply, without ever sending what is in it
            run_clientapp.push_objects = lambda *_, **__: time.sleep(FOREVER)
    return reply


app = make_client_app(lambda context: digits_task(context.run_config, context), mods=[misbehave])
