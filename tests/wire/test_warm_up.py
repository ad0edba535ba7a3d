"""After `warm_up`, no message meets a kernel that has not been compiled."""

import sys
from pathlib import Path

import pytest

from tests.commands import run

SCRIPT = """
import pkgutil, importlib
from dataclasses import replace
import aqg.wire
from aqg.core.messages import Upload
from aqg.wire import decode, encode, warm_up
from tests.wire.golden.make import golden_messages
from tests.wire.hostile import good_frames, known_for

def compiled():
    names = [m.name for m in pkgutil.iter_modules(aqg.wire.__path__)]
    modules = [importlib.import_module("aqg.wire." + name) for name in names]
    return {
        (module.__name__, name): len(kernel.signatures)
        for module in modules
        for name, kernel in vars(module).items()
        if hasattr(kernel, "signatures")
    }

warm_up()
before = compiled()
assert any(before.values())
messages = list(golden_messages().values())
for data, length in good_frames():
    for kind in (bytes, bytearray, memoryview):
        message = decode(kind(data), length, known=known_for(length))
    messages.append(message)
for index, upload in enumerate([m for m in messages if isinstance(m, Upload)]):
    levels = upload.levels.copy()
    levels.flags.writeable = bool(index % 2)
    messages.append(replace(upload, levels=levels[::-1] if index % 3 else levels))
for message in messages:
    assert decode(encode(message), len(message) if hasattr(message, "__len__") else 0) == message
after = compiled()
assert after == before, {name: after[name] for name in after if after[name] != before[name]}
print("ok")
"""


@pytest.mark.soak
def test_warm_up_compiles_everything():
    root = Path(__file__).parents[2]
    assert run(sys.executable, "-W", "error", "-c", SCRIPT, cwd=root) == "ok\n"
