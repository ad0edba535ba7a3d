"""The server's side: the net to start from, and the test of a net."""

from aqg.flower import make_server_app

from .task import accuracy, make_net

app = make_server_app(make_net(), evaluate=accuracy)
