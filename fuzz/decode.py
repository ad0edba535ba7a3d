"""Coverage-guided fuzzing of ``aqg.wire.decode``: see README.md beside this file.

The first two bytes of an input are the length the receiver expects, the third tells whether to
repair the checksum (so that the fuzzer gets past it), the rest is the frame.

Numba is hidden: the kernels then run as plain Python, and the fuzzer sees every branch in them.
"""

from __future__ import annotations

import sys

import atheris

sys.modules["numba"] = None  # type: ignore[assignment]

with atheris.instrument_imports(include=["aqg.wire", "aqg.core.messages"]):
    from aqg.core.messages import Skip
    from aqg.errors import WireError
    from aqg.wire import decode, encode

    from tests.wire.hostile import known_for, sealed


def test_one_input(data: bytes) -> None:
    """Decode; what is accepted must be valid and survive another round trip."""
    if len(data) < 3:
        return
    length = (data[0] | data[1] << 8) & 0x03FF
    frame = data[3:]
    if data[2] & 1 and len(frame) > 4:
        frame = sealed(frame[:-4], length)
    try:
        message = decode(frame, length, known=known_for(length))
    except WireError:
        return
    if isinstance(message, Skip):
        return
    message.validate()
    again = encode(message)
    if len(message) != length or decode(again, length) != message:
        raise AssertionError("a decoded message does not survive the wire")


def main() -> None:
    """Run until stopped, or as long as libFuzzer's options say."""
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
