"""Federated learning over HTTP through a proxy that loses, repeats and delays messages."""

import http.client
import importlib.util
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from aqg.protocol import ClientSession, ServerSession

FILE = Path(__file__).parents[2] / "examples/http/federated.py"
ROUNDS = 25


@pytest.fixture(scope="module")
def federated():
    spec = importlib.util.spec_from_file_location("federated", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROUNDS = ROUNDS
    return module


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Proxy(BaseHTTPRequestHandler):
    """Forwards requests: not at all, without their response, twice, late, or as they are."""

    behind: tuple[str, int]
    rng = np.random.default_rng(0)
    seen: ClassVar[Counter[str]] = Counter()
    late: ClassVar[list[threading.Timer]] = []

    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        trouble = self.rng.choice(["lose", "mute", "twice", "late", ""], p=[0.1] * 4 + [0.6])
        self.seen[trouble + self.command] += 1
        if trouble == "late" and body is not None:  # a second copy comes long after its round
            timer = threading.Timer(0.5, self.forward, [body])
            timer.start()
            self.late.append(timer)
        if trouble == "twice":
            self.forward(body)
        if trouble != "lose":
            status, answer = self.forward(body)
        if trouble in ("lose", "mute"):
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET  # noqa: N815

    def forward(self, body):
        connection = http.client.HTTPConnection(*self.behind, timeout=10)
        connection.request(self.command, self.path, body)
        with connection.getresponse() as response:
            return response.status, response.read()

    def log_message(self, *_):
        pass


def learn(federated, path, troubled):
    session = ServerSession(np.zeros(8), 3, recipe="lean", path=path / "server")
    handler = type("Own", (federated.Handler,), {"session": session, "lock": threading.Lock()})
    with serving(handler) as server:
        Proxy.behind = server
        with serving(Proxy) as proxy:
            address = proxy if troubled else server
            with ThreadPoolExecutor(3) as pool:
                for client in range(3):
                    own = ClientSession(path / str(client))
                    gradient = federated.gradient_of(client)
                    pool.submit(federated.take_part, address, client, own, gradient)
            for timer in Proxy.late:
                timer.join()
    assert session.round == ROUNDS + 1
    return session.parameters


def test_trouble_changes_nothing(federated, tmp_path):
    """Every round waits for all clients, so the model is that of an undisturbed run."""
    started = time.monotonic()
    calm = learn(federated, tmp_path / "calm", troubled=False)
    troubled = learn(federated, tmp_path / "troubled", troubled=True)
    for kind in ("lose", "mute", "twice", "late"):
        assert Proxy.seen[kind + "POST"] > 0, Proxy.seen
        assert Proxy.seen[kind + "GET"] > 0, Proxy.seen
    # Replies arrive in another order, and sums may differ in the last bit.
    assert np.allclose(calm, troubled, rtol=0, atol=1e-12)
    assert np.abs(calm - np.arange(8.0)).max() < 1  # from seven, in few rounds
    assert time.monotonic() - started < 60
