"""Imported by the fork server: what forked commands need besides modules. Starts no threads."""

from aqg.warmup import warm_up

import tests.lab.repairs  # noqa: F401

warm_up()
