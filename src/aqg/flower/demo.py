"""A whole deployment on this machine: start it, train on digits, count every byte, stop it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aqg.flower.app
from aqg.errors import RunError
from aqg.flower.app.aqg_digits.task import make_problem, simulator_config
from aqg.flower.deploy.deployment import Deployment, DeploymentOptions
from aqg.flower.settings import read_settings
from aqg.runs.cost import DOWNLOADS, UPLOADS
from aqg.runs.directory import ROUNDS, SUMMARY, create_directory
from aqg.runs.loop import slug

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqg.flower.deploy.deployment import ConfigValue
    from aqg.flower.deploy.meter import Traffic

APP = Path(aqg.flower.app.__file__).parent
PRELOAD = ("aqg.flower", "aqg.runs.setup", "sklearn.datasets")

_FLOAT_BYTES = 4
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_BETWEEN_QUESTIONS = 3.0


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What ``aqg flower demo`` runs.

    Attributes:
        directory: where results and logs go; new or empty.
        nodes: how many SuperNodes.
        rounds: how many rounds.
        recipe: the compressor.
        seed: makes the run repeatable.
        tls: encrypt, and let in only nodes with a registered key.

    """

    directory: Path
    nodes: int = 3
    rounds: int = 20
    recipe: str = "auto"
    seed: int = 0
    tls: bool = False

    @property
    def run_directory(self) -> Path:
        """Where the training is written, as the simulator writes it."""
        return self.directory / slug(self.recipe)


@dataclass(frozen=True)
class NodeBytes:
    """What one node cost in a run.

    Attributes:
        node: which.
        uploads: how often it sent something.
        upload_bytes: length of its frames.
        download_bytes: length of what its orders carried.
        total_bytes: both.
        transport: bytes on its connection, with everything that Flower adds.
        plain_bytes: length of a gradient and a model as float32, in every round.

    """

    node: int
    uploads: int
    upload_bytes: int
    download_bytes: int
    total_bytes: int
    transport: Traffic
    plain_bytes: int


class Demo:
    """Runs the digits app on a deployment of its own; a context manager around its processes."""

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.run_config = self._run_config()
        read_settings(self.run_config)
        self.num_params = make_problem(self.run_config).objective.num_params
        deployment_options = DeploymentOptions(
            num_nodes=options.nodes, tls=options.tls, preload=PRELOAD
        )
        create_directory(options.directory)
        self.deployment = Deployment(options.directory / "deployment", deployment_options)

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self.deployment.close()

    def run(self) -> Iterator[dict[str, Any]]:
        """Start everything and train; yields the line of every round, as it is written."""
        self.deployment.start()
        self._before = [self.deployment.traffic(node) for node in range(self.options.nodes)]
        run = self.deployment.run(APP, self.run_config)
        yield from self._follow(run)

    def summary(self) -> dict[str, Any]:
        """Return the run's results."""
        summary: dict[str, Any] = json.loads((self.options.run_directory / SUMMARY).read_text())
        return summary

    def byte_table(self) -> list[NodeBytes]:
        """Return what every node has sent and received since the run began."""
        rows = self._lines()
        table = []
        for node in range(self.options.nodes):
            sent = sum(row[UPLOADS][node] for row in rows)
            received = sum(row[DOWNLOADS][node] for row in rows)
            table.append(
                NodeBytes(
                    node=node,
                    uploads=sum(row["widths"][node] > 0 for row in rows),
                    upload_bytes=sent,
                    download_bytes=received,
                    total_bytes=sent + received,
                    transport=self.deployment.traffic(node) - self._before[node],
                    plain_bytes=2 * _FLOAT_BYTES * self.num_params * len(rows),
                )
            )
        return table

    def _run_config(self) -> dict[str, ConfigValue]:
        options = self.options
        config: dict[str, ConfigValue] = {
            "num-clients": options.nodes,
            "num-server-rounds": options.rounds,
            "recipe": options.recipe,
            "seed": options.seed,
            "run-dir": str(options.run_directory.resolve()),
            "trust-partition-id": not options.tls,
        }
        return {**config, "alpha": simulator_config(config).alpha}

    def _follow(self, run: int) -> Iterator[dict[str, Any]]:
        """Yield lines until the summary is there; ask Flower now and then whether all is well."""
        num_seen, asked = 0, time.monotonic()
        while True:
            is_complete = (self.options.run_directory / SUMMARY).exists()
            lines = self._lines()
            yield from lines[num_seen:]
            num_seen = len(lines)
            if is_complete:
                return
            if time.monotonic() - asked > _SECONDS_BETWEEN_QUESTIONS:
                status = self.deployment.status(run)
                asked = time.monotonic()
                if status.startswith("finished") and status != "finished:completed":
                    log = self.deployment.processes.log_of("superlink-worker")
                    raise RunError(f"the run is {status}; see {log}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _lines(self) -> list[dict[str, Any]]:
        """Return the complete lines that the server has written so far."""
        path = self.options.run_directory / ROUNDS
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
