"""A Flower grid in memory: real messages, really serialized, real apps, and faults on demand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from aqg.errors import AqgError
from aqg.flower.envelope import Envelope

from tests.flower.own_messages import learn

SUPERLINK_NODE = 1
RAISED = 2
"""Flower's error code for a ClientApp that raised."""


def is_farewell(message):
    """Tell whether a message says that a run has ended."""
    try:
        return any(
            kind == Envelope.ENDED for _, kind, _ in Envelope.unpack(message.content).records
        )
    except AqgError:
        return False


def on_the_wire(message):
    """Serialize and read back."""
    data = message_to_proto(message).SerializeToString()
    return message_from_proto(MessageProto.FromString(data))


@dataclass
class MemoryGrid(Grid):
    """Runs the ClientApp of every node when a message is pushed, and keeps its reply.

    ``deliver`` sees every message to a node, ``answer`` every reply; each may return another one
    in its place, or None to lose it. ``extra`` holds replies to hand out beside the real ones.
    """

    client_app: ClientApp
    node_configs: dict[int, dict[str, Any]]
    run_config: dict[str, Any] = field(default_factory=dict)
    deliver: Callable[[int, Message], Message | None] = lambda node, message: message
    answer: Callable[[int, Message], Message | None] = lambda node, message: message
    run_id: int = 7
    keeps_memories: bool = False
    """Whether nodes are spared the order to forget a run that has ended."""

    def __post_init__(self):
        TaskIdentity.run_id, TaskIdentity.task_id = self.run_id, 1
        TaskIdentity.node_id = SUPERLINK_NODE
        self.contexts = {}
        self.replies = []
        self.extra = []
        self.rounds = Counter()  # the train messages to each node
        self._ids = count(1)

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *arguments, **options):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(set(self.push_messages(messages)))

    def get_node_ids(self):
        return list(self.node_configs)

    def push_messages(self, messages):
        identifiers = []
        for message in messages:
            identifier = f"message-{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = identifier
            identifiers.append(identifier)
            node = message.metadata.dst_node_id
            self.rounds[node] += message.metadata.message_type == "train"
            learn(message)
            delivered = self.deliver(node, on_the_wire(message))
            if delivered is not None and node in self.node_configs:
                reply = self.answer(node, on_the_wire(self.call(node, delivered)))
                self.replies += [] if reply is None else [reply]
        return identifiers

    def pull_messages(self, message_ids):
        wanted = set(message_ids)
        found = [m for m in self.replies if m.metadata.reply_to_message_id in wanted]
        self.replies = [m for m in self.replies if m not in found]
        found += self.extra
        self.extra = []
        return found

    def call(self, node, message):
        """Run the node's ClientApp as a SuperNode does: an exception becomes an error reply."""
        if self.keeps_memories and is_farewell(message):
            return Envelope().reply_to(message)
        try:
            return self.client_app(message, self.context_of(node))
        except Exception as error:
            return Message(Error(RAISED, f"{type(error).__name__}: {error}"), reply_to=message)

    def context_of(self, node):
        if node not in self.contexts:
            self.contexts[node] = Context(
                self.run_id, node, dict(self.node_configs[node]), RecordDict(), self.run_config
            )
        return self.contexts[node]

    def restart_node(self, node, new_id=None):
        """Forget what Flower keeps of a node; without a key it also comes back under a new id."""
        self.contexts.pop(node, None)
        if new_id is not None:
            self.node_configs[new_id] = self.node_configs.pop(node)


def server_context(run_config):
    return Context(7, SUPERLINK_NODE, {}, RecordDict(), run_config)
