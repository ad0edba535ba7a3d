"""Three clients of our own server in memory: their files and faults, and the simulator's run."""

import json

from aqg import make_recipe
from aqg.core.recipe import kind_of_updates
from aqg.flower import FlowerTask, make_client_app, make_server_app
from aqg.flower.journal import RunLogger
from aqg.protocol.store import read_arrays
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import Training

from tests.flower.memory_grid import MemoryGrid, server_context
from tests.flower.own_messages import Saved
from tests.problems import tiny_problem

ALPHA = 0.1
DOWNLINKS = ("full", "exact", "condensed")
PROBLEM = tiny_problem(num_clients=3, unequal=True)
NODES = (11, 18, 25)
LOST = object()
_KEYS = {"rounds": "num-server-rounds", "participation": "fraction-train"}


def samples_of(context):
    return PROBLEM.clients[int(context.node_config["partition-id"])]


def task_of(context):
    return FlowerTask.from_objective(PROBLEM.objective, *samples_of(context))


def round_of(message):
    """Return the round that a train message belongs to; 0 for other messages."""
    kind = message.metadata.message_type
    return int(message.metadata.group_id) if kind == "train" else 0


def at(rounds, node, act=lambda message: LOST):
    """Return what acts on the messages to or from a node in some rounds.

    A message is lost where that returns ``LOST``.
    """
    rounds = {rounds} if isinstance(rounds, int) else set(rounds)

    def pass_on(who, message):
        is_due = who == node and round_of(message) in rounds
        return None if is_due and act(message) is LOST else message

    return pass_on


class Federation:
    """Three nodes, a run directory, and a state directory for each node."""

    def __init__(self, path, task=task_of, **config):
        self.path = path
        self.config = {"num-clients": 3, "num-server-rounds": 8, "alpha": ALPHA, "recipe": "qgd"}
        self.config |= {"downlink": "exact", "weighting": "equal", "exact": True}
        self.config |= {"trust-partition-id": True, "round-timeout": 1.0, "start-timeout": 2.0}
        self.config |= {"run-dir": str(path / "run"), "client-state-dir": str(path / "nodes")}
        self.config |= {_KEYS.get(k, k).replace("_", "-"): value for k, value in config.items()}
        nodes = {NODES[index]: {"partition-id": index} for index in (2, 0, 1)}
        app = make_client_app(task)
        self.grid = MemoryGrid(app, nodes, self.config, keeps_memories=True)

    def run(self, start=PROBLEM.initial_params, **options):
        """Run to the end, or on from the checkpoint; return the final model."""
        finals = []
        app = make_server_app(start, on_finish=finals.append, **options)
        app(self.grid, server_context(self.config))
        return finals[0]

    def rows(self):
        text = (self.path / "run" / "rounds.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    @property
    def summary(self):
        return json.loads((self.path / "run" / "summary.json").read_text())

    @property
    def checkpoint(self):
        return read_arrays(self.path / "run" / "checkpoint.npz")

    def total(self, name):
        return sum(row[name] for row in self.rows())

    def incidents(self):
        """Return round and client of all incidents, by their kinds."""
        found = {}
        for row in self.rows():
            for one in row.get("incidents", []):
                found.setdefault(one["kind"], []).append((row["round"], one["client"]))
        return found

    def texts(self):
        """Return what is said of all incidents."""
        return {one["text"] for row in self.rows() for one in row.get("incidents", [])}

    def place_of(self, client):
        return self.path / "nodes" / f"partition-{client}"

    def copy_of(self, client):
        (found,) = (path for path in self.place_of(client).iterdir() if "-" not in path.name)
        return found

    def mirror_of(self, client):
        (found,) = self.place_of(client).glob("*-*")
        return found

    def agree(self):
        """Whether every client's mirror and model on disk are the server's."""
        updates = kind_of_updates(self.config["exact"], self.config.get("fraction-train", 1.0))
        recipe = make_recipe(self.config["recipe"]).for_updates(updates)
        saved = Saved(self.path / "run", recipe, self.config["downlink"])
        return all(saved.agrees(client, self.place_of(client)) for client in range(3))


def reference(recipe, rounds, step_size=ALPHA, **training):
    """Return the simulator after so many rounds."""
    training, made = Training(**training), make_recipe(recipe)
    simulation = ReferenceSimulation(PROBLEM, made, step_size, seed=0, training=training)
    for _ in range(rounds):
        simulation.run_round()
    return simulation


class KilledError(BaseException):
    """Stands for the end of the server's process."""


class Killer(RunLogger):
    """Ends the server in the middle of its work."""

    def __init__(self, at_round):
        self.at_round = at_round

    def round(self, report):
        if report.line.record.round == self.at_round:
            raise KilledError
