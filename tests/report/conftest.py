"""Run directories to report on, written by the code that writes real ones."""

import numpy as np
import pytest

from aqg.runs.config import resolve
from aqg.runs.cost import ClientBytes
from aqg.runs.directory import ROUNDS, SUMMARY, Line
from aqg.runs.files import seal, to_json, write_atomically
from aqg.runs.loop import create_run
from aqg.runs.stopping import summarize
from aqg.sim.record import DROPPED, RoundRecord

MINIMUM = 0.25


def make_lines(num_rounds, num_clients, seed, decay=0.05, fault=None):
    """Make up rounds: clients send 4 bits, then 1 or 2, or nothing; every fifth one is away."""
    draw = np.random.default_rng(seed)
    lines = []
    for k in range(num_rounds):
        width = 4 if k < 3 else int(draw.integers(1, 3))
        widths = np.where(draw.random(num_clients) < 0.4, width, 0)
        widths[draw.random(num_clients) < 0.2] = DROPPED
        loss = MINIMUM + float(np.exp(-decay * k + 0.05 * draw.normal()))
        sent = np.where(widths == DROPPED, 0, 10 + 50 * widths)
        received = np.where(widths == DROPPED, 0, 500)
        faults = ((1, fault),) if fault and k == 2 else ()
        both = {"client_upload_bytes": sent, "client_download_bytes": received}
        both = {name: tuple(counts.tolist()) for name, counts in both.items()}
        seen = k + 1, loss, tuple(widths.tolist()), int(sent.sum()), faults
        record = RoundRecord(*seen, download_bytes=int(received.sum()), **both)
        accuracy = 0.1 + 0.8 * k / num_rounds
        metrics = {"accuracy": accuracy, "perplexity": 9 - 8 * accuracy}
        lines.append(Line(record, metrics if k % 5 == 0 else {}))
    return lines


@pytest.fixture(scope="session")
def make_run():
    """Return a function that writes a run directory."""

    def write(
        directory, recipe="lean", seed=0, rounds=40, finished=True, fault=None, decay=0.05, **more
    ):
        settings = {"recipe": recipe, "seed": seed, "rounds": rounds, "target": 0.5, **more}
        (config,) = resolve(settings)
        create_run(directory, config)
        lines = make_lines(rounds, config.clients, seed, decay, fault)
        text = "".join(seal(line.to_json()) + "\n" for line in lines)
        write_atomically(directory / ROUNDS, text.encode())
        if finished:
            final = lines[-1].record.loss
            metrics = {"accuracy": 0.9, "perplexity": 1.8}
            summary = summarize(recipe, lines, final, metrics, MINIMUM, config.goal)
            client_bytes = ClientBytes(config.clients)
            for line in lines:
                client_bytes.add(line.record)
            row = summary | client_bytes.to_json()
            write_atomically(directory / SUMMARY, to_json(row).encode())
        return directory

    return write
