"""The server of the digits app."""

from aqg.flower import make_server_app
from aqg.flower.demo import DIGITS, digits_config
from aqg.runs.setup import build_problem


def initial_params(context):
    return build_problem(digits_config(context.run_config)).initial_params


def evaluate(params):
    return build_problem(digits_config({"num-clients": 1})).test_accuracy(params)


app = make_server_app(initial_params, evaluate=evaluate, describe=DIGITS)
