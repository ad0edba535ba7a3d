"""Federated learning over HTTP with a network that loses, repeats and delays messages."""

import importlib.util
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

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


class Network:
    """Sends requests: not at all, without their response, twice, late, or as they are."""

    def __init__(self, request):
        self.request, self.rng = request, np.random.default_rng(0)
        self.seen, self.late = Counter(), []

    def __call__(self, address, method, client, body=None):
        trouble = self.rng.choice(["lose", "mute", "twice", "late", ""], p=[0.1] * 4 + [0.6])
        self.seen[trouble + method] += 1
        sent = (address, method, client, body)
        if trouble == "lose":
            raise OSError("lost on the way there")
        if trouble == "twice":
            self.request(*sent)
        if trouble == "late" and body is not None:  # a second copy comes long after its round
            self.late.append(threading.Timer(0.5, self.request, sent))
            self.late[-1].start()
        response = self.request(*sent)
        if trouble == "mute":
            raise OSError("lost on the way back")
        return response


def learn(federated, path):
    session = ServerSession(np.zeros(8), 3, recipe="lean", path=path / "server")
    handler = type("Own", (federated.Handler,), {"session": session, "lock": threading.Lock()})
    with serving(handler) as address:
        with ThreadPoolExecutor(3) as pool:
            for client in range(3):
                own = ClientSession(path / str(client))
                gradient = federated.gradient_of(client)
                pool.submit(federated.take_part, address, client, own, gradient)
        for timer in getattr(federated.request, "late", ()):
            timer.join()
    assert session.round == ROUNDS + 1
    return session.parameters


def test_trouble_changes_nothing(federated, tmp_path, monkeypatch):
    """Every round waits for all clients, so the model is that of an undisturbed run."""
    started = time.monotonic()
    calm = learn(federated, tmp_path / "calm")
    network = Network(federated.request)
    monkeypatch.setattr(federated, "request", network)
    troubled = learn(federated, tmp_path / "troubled")
    for kind in ("lose", "mute", "twice", "late"):
        assert network.seen[kind + "POST"] > 0, network.seen
        assert network.seen[kind + "GET"] > 0, network.seen
    # Replies arrive in another order, and sums may differ in the last bit.
    assert np.allclose(calm, troubled, rtol=0, atol=1e-12)
    assert np.abs(calm - np.arange(8.0)).max() < 1  # from seven, in few rounds
    assert time.monotonic() - started < 60
