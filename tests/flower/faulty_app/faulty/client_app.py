"""The digits app's client behind a mod that does what the test orders, once."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord
from flwr.supernode.runtime import run_clientapp

from aqg.flower import make_client_app
from aqg.flower.app.aqg_digits.client_app import make_task
from aqg.protocol.store import ClientStore

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp.typing import ClientAppCallable

BEFORE = ("backup", "restore", "wipe", "damage", "linger")
AFTER = ("announce", "corrupt", "drop", "delay", "replay")
RECORDS = ("reply", "frame")
FOREVER = 1e6
SHORTEST_UPLOAD = 10
"""A frame of fewer bytes moves no mirror."""


def misbehave(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Look for an order beside the state directory, and carry it out with the next upload."""
    if message.metadata.message_type != "train":
        return call_next(message, context)
    state = Path(str(context.node_config["aqg-state-dir"]))
    order = state.with_name(f"{state.name}.order")
    deed, _, argument = (order.read_text() if order.exists() else "").partition(" ")
    if deed == "away":
        stay_away(order, int(argument))
    if deed in BEFORE:
        os.unlink(order)
        prepare(deed, state, message)
    reply = call_next(message, context)
    if deed == "twice":
        os.unlink(order)
        again = call_next(message, context)
        assert again.content["reply"]["stale"], "an order was obeyed twice"
    frame = bytes(reply.content["frame"]["bytes"])
    earlier = state.with_name(f"{state.name}.earlier")
    if deed in AFTER and len(frame) >= SHORTEST_UPLOAD:
        os.unlink(order)
        reply = change_reply(deed, argument, reply, earlier)
    elif len(frame) >= SHORTEST_UPLOAD:
        keep(reply, earlier)
    return reply


def stay_away(order: Path, rounds: int) -> None:
    """Lose so many orders: the handler never sees them."""
    if rounds == 0:
        os.unlink(order)
        return
    order.write_text(f"away {rounds - 1}")
    raise ConnectionError("the order is lost, as ordered")


def prepare(deed: str, state: Path, message: Message) -> None:
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
            log = bytearray(message.content["order"]["log"])
            log[len(log) // 2] ^= 0x10
            message.content["order"]["log"] = bytes(log)
        case "linger":  # with the entries read, and nothing saved
            ClientStore.save = lambda *_, **__: time.sleep(FOREVER)


def change_reply(deed: str, argument: str, reply: Message, earlier: Path) -> Message:
    """Do to a reply what happens on networks."""
    match deed:
        case "drop":
            raise ConnectionError("the reply is dropped, as ordered")
        case "delay":
            time.sleep(float(argument))
        case "announce":  # the reply, without ever sending what is in it
            run_clientapp.push_objects = lambda *_, **__: time.sleep(FOREVER)
        case "corrupt":
            frame = bytearray(reply.content["frame"]["bytes"])
            frame[len(frame) // 2] ^= 0x10
            reply.content["frame"]["bytes"] = bytes(frame)
        case "replay":
            for name in RECORDS:
                content = earlier.with_suffix(f".{name}").read_bytes()
                reply.content[name] = ConfigRecord.inflate(content)
    return reply


def keep(reply: Message, path: Path) -> None:
    """Write an upload down, for a later replay."""
    for name in RECORDS:
        path.with_suffix(f".{name}").write_bytes(reply.content[name].deflate())


app = make_client_app(make_task, mods=[misbehave])
