"""Imported by the fork server: what forked commands need besides modules. Starts no threads."""

from aqg.objectives.closed_form import stay_with_numpy
from aqg.warmup import warm_up

import tests.lab.repairs  # noqa: F401

stay_with_numpy()  # a forked command computes too little to be worth importing torch
warm_up()
