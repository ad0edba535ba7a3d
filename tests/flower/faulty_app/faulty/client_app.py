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

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp.typing import ClientAppCallable

BEFORE = ("backup", "restore", "wipe")
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
    if deed in BEFORE:
        os.unlink(order)
        change_state(deed, state)
    reply = call_next(message, context)
    frame = bytes(reply.content["frame"]["bytes"])
    earlier = state.with_name(f"{state.name}.earlier")
    if deed in AFTER and len(frame) >= SHORTEST_UPLOAD:
        os.unlink(order)
        reply = change_reply(deed, argument, reply, earlier)
    elif len(frame) >= SHORTEST_UPLOAD:
        keep(reply, earlier)
    return reply


def change_state(deed: str, state: Path) -> None:
    """Do to the state directory what happens to disks."""
    copy = state.with_name(f"{state.name}.backup")
    if deed == "backup":
        shutil.copytree(state, copy)
        return
    shutil.rmtree(state)
    if deed == "restore":
        shutil.copytree(copy, state)


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
