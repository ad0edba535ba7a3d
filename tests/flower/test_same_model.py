"""The same training through every transport: sessions, HTTP and Flower end with the same bits."""

from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aqg.protocol import ClientSession, ServerSession
from aqg.sim.training import LocalTraining

from tests.flower.test_apps import ALPHA, PROBLEM, local_federation

if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = Callable[[int, bytes], bytes]

ROUNDS = 12
LOCAL = LocalTraining(batch_size=2, steps=3)
"""As that of `local_federation`."""


def make_session(recipe, downlink):
    return ServerSession(
        PROBLEM.initial_params, num_clients=3, recipe=recipe, step_size=ALPHA, downlink=downlink
    )


def clients():
    """Return what answers orders, for every client."""

    def make(client):
        session, samples = ClientSession(), PROBLEM.clients[client]

        def train(params, number):
            key = (0, client, number)
            return LOCAL.update(PROBLEM.objective, params, *samples, key)[1]

        return lambda order: session.answer(order, train)

    return [make(client) for client in range(3)]


def play(server, answer):
    for _ in range(ROUNDS):
        for client in range(3):
            receipt = server.take(client, answer(client, server.order(client)))
            if receipt.wants_order:
                receipt = server.take(client, answer(client, server.order(client)))
            assert receipt.is_taken, receipt.problem
        server.step()
    return server.parameters


@contextmanager
def over_http(answers):
    """Carry orders and replies over real connections."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            order = self.rfile.read(int(self.headers["Content-Length"]))
            reply = answers[int(self.path[1:])](order)
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()

    def answer(client, order):
        connection = HTTPConnection(*server.server_address[:2], timeout=60.0)
        connection.request("POST", f"/{client}", order)
        return connection.getresponse().read()

    try:
        yield answer
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("recipe", "downlink"), [("auto", "condensed"), ("lean", "condensed"), ("lean", "exact")]
)
def test_every_transport_ends_with_the_same_model(tmp_path, recipe, downlink):
    answers = clients()
    in_process = play(make_session(recipe, downlink), lambda client, order: answers[client](order))
    with over_http(clients()) as answer:
        assert np.array_equal(play(make_session(recipe, downlink), answer), in_process)
    federation = local_federation(tmp_path, recipe=recipe, downlink=downlink)
    on_flower = federation.run()
    assert np.array_equal(on_flower, in_process)
    assert not any(row.get("incidents") for row in federation.rows())
    assert not np.array_equal(on_flower, PROBLEM.initial_params)
