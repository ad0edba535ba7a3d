"""The digits app's own server."""

from aqg.flower.app.aqg_digits import server_app

app = server_app.app
