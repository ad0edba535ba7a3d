"""Federated learning over plain HTTP with the standard library: see README.md."""

import http.client
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from aqg.protocol import ClientSession, ServerSession

NUM_CLIENTS, ROUNDS, ADDRESS = 3, 60, ("127.0.0.1", 8123)


class Handler(BaseHTTPRequestHandler):
    """``GET /2`` returns the order for client 2, and ``POST /2`` takes its reply."""

    session: ServerSession
    lock = threading.Lock()

    def do_GET(self) -> None:
        """Send an order, or 204: wait for the others, or 410: training is over."""
        with self.lock:
            client, session = int(self.path[1:]), self.session
            status = 410 if session.round > ROUNDS else 204 if client in session.answered else 200
            self.respond(status, session.order(client) if status == 200 else b"")

    def do_POST(self) -> None:
        """Take a reply; what is wrong with one, the next order repairs."""
        reply = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            receipt = self.session.take(int(self.path[1:]), reply)
            if len(self.session.answered) == NUM_CLIENTS:
                self.session.step()
            self.respond(200, receipt.problem.encode())

    def respond(self, status: int, body: bytes) -> None:
        """Send a status and a body."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


def request(address, method: str, client: int, body: bytes | None = None) -> tuple[int, bytes]:
    """Send a request; return status and body."""
    connection = http.client.HTTPConnection(*address, timeout=10)
    connection.request(method, f"/{client}", body)
    with connection.getresponse() as response:
        return response.status, response.read()


def take_part(address, client: int, session: ClientSession, train) -> None:
    """Fetch orders and send replies until training is over."""
    status = 0
    while status != 410:
        try:
            status, order = request(address, "GET", client)
            if status == 200:
                request(address, "POST", client, session.answer(order, train))
        except (OSError, http.client.HTTPException):
            pass  # lost on the way: ask again
        time.sleep(0.01)


def gradient_of(client: int):
    """Return the gradient of a client's own least-squares problem."""
    inputs = np.random.default_rng(client).standard_normal((50, 8))
    targets = inputs @ np.arange(8.0)
    return lambda model, _round: inputs.T @ (inputs @ model - targets) / len(targets)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        Handler.session = ServerSession(np.zeros(8), NUM_CLIENTS, recipe="lean", path="server")
        server = ThreadingHTTPServer(ADDRESS, Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while Handler.session.round <= ROUNDS:
            time.sleep(0.5)
        print("the model:", Handler.session.parameters.round(2))
    else:
        number = int(sys.argv[2])
        take_part(ADDRESS, number, ClientSession(f"client-{number}"), gradient_of(number))
