"""A client whose gradient is noise around the model."""

import atexit
import re
from pathlib import Path

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from aqg.flower import FlowerTask, make_client_app


def train(params: np.ndarray, round_number: int, key: tuple[int, int, int]) -> tuple:
    """Return a loss and a gradient, with no more memory than the gradient itself."""
    del round_number
    gradient = np.random.default_rng(key).standard_normal(len(params), np.float32)
    gradient += params
    return 0.0, gradient


def report_memory(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Write down how much memory this process has held, when all is sent."""
    atexit.register(print_peak)
    reply = call_next(message, context)
    print_peak()
    return reply


def print_peak() -> None:
    """Print the most memory that this process has held, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(f"peak memory {1024 * int(found[1])}", flush=True)


app = make_client_app(lambda _: FlowerTask(train, num_samples=1), mods=[report_memory])
