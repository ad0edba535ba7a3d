"""A LoRA app shaped like FlowerTune's: what that leaderboard's counter says, before and after.

python benchmarks/flowertune.py                        # into results/flowertune.md
python benchmarks/flowertune.py --rounds 20 --out /tmp/flowertune.md

A decoder of 19 million parameters is trained for a short time on 37 plays without the largest 20
roles, and frozen. Those roles are 20 nodes; 2 of them are asked in each of 200 rounds, and train
low-rank adapters (rank 32, on the queries and values of each layer) with AdamW and FlowerTune's
schedule of rates. Needs ``shakespeare/roles.json.gz`` in ``AQG_DATA_DIR``. Handlers, strategy and
messages are Flower's, serialized as Flower does, in one process.

FlowerTune adds up ``record.count_bytes()`` of all ArrayRecords in its strategy. That is inside the
wrapper, where models are whole again. Here the same sum is taken below it, where messages leave and
arrive, and over all records, as what is compressed travels in a ConfigRecord.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from aqg.flower import Compressed, aqg_mod
from aqg.models.nets import Transformer, token_cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.shakespeare import LENGTH, alphabet_of, read_roles, text_windows

from tests.flower.memory_grid import MemoryGrid

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
MB = 1024**2
DEFAULTS = {"rounds": 200, "base_steps": 60, "width": 512, "layers": 6}
NUM_NODES, PER_ROUND = 20, 2
RANK, ALPHA = 32, 64
MOST_RATE, LEAST_RATE = 1e-3, 1e-5
NUM_TEST, TEST_EVERY = 32, 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=DEFAULTS["rounds"])
    parser.add_argument("--steps", type=int, default=2, help="of a node in a round")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--width", type=int, default=DEFAULTS["width"])
    parser.add_argument("--layers", type=int, default=DEFAULTS["layers"])
    parser.add_argument("--base-steps", type=int, default=DEFAULTS["base_steps"])
    parser.add_argument("--recipe", help="the wrapper's own choice by default")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "flowertune.md")
    options = parser.parse_args()
    if "AQG_DATA_DIR" not in os.environ:
        raise SystemExit("set AQG_DATA_DIR to a folder that has shakespeare/roles.json.gz")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    task = Task(options)
    print(f"base: {task.num_base:,} parameters, test loss {task.test():.3f}", flush=True)
    rows = [measure(task, options, has_lines) for has_lines in (False, True)]
    text = report(task, options, rows)
    options.out.write_text(text)
    print(text)


class Lora(nn.Module):
    """A frozen layer that makes queries, keys and values, with adapters for the first and last."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        for name in ("q", "v"):
            setattr(self, f"{name}_lora_a", nn.Parameter(torch.empty(RANK, layer.in_features)))
            setattr(self, f"{name}_lora_b", nn.Parameter(torch.zeros(layer.in_features, RANK)))
            nn.init.kaiming_uniform_(getattr(self, f"{name}_lora_a"), a=math.sqrt(5))

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.layer(inputs).chunk(3, dim=-1)
        query = query + ALPHA / RANK * (inputs @ self.q_lora_a.T @ self.q_lora_b.T)
        value = value + ALPHA / RANK * (inputs @ self.v_lora_a.T @ self.v_lora_b.T)
        return torch.cat((query, key, value), dim=-1)


class Task:
    """The frozen base, the nodes' texts, and the text that no node has."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.steps, self.batch_size = options.steps, options.batch_size
        roles = read_roles(Path(os.environ["AQG_DATA_DIR"]))
        alphabet = alphabet_of(roles)
        largest = sorted(roles, key=lambda role: -sum(map(len, roles[role])))[:NUM_NODES]
        windows = [cut(roles[role], alphabet) for role in largest]
        self.nodes = [(x[: -len(x) // 10], y[: -len(y) // 10]) for x, y in windows]
        held_out = [
            torch.cat([part[-len(part) // 10 :] for part in w]) for w in zip(*windows, strict=True)
        ]
        chosen = torch.randperm(len(held_out[0]))[:NUM_TEST]
        self.held_out = held_out[0][chosen], held_out[1][chosen]
        self.model = Transformer(len(alphabet), LENGTH, options.width, options.layers, heads=8)
        self.num_base = sum(p.numel() for p in self.model.parameters())
        others = [speech for role in roles if role not in largest for speech in roles[role]]
        self._pretrain(cut(others, alphabet), options.base_steps)
        self.model.requires_grad_(requires_grad=False)
        for block in self.model.blocks:
            block.attention = Lora(block.attention)
        self.first = self.adapters()
        self.num_adapters = sum(tensor.numel() for tensor in self.first.values())

    def _pretrain(self, texts: tuple[Tensor, Tensor], num_steps: int) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)
        for _ in range(num_steps):
            batch = torch.randint(len(texts[0]), (8,))
            optimizer.zero_grad()
            token_cross_entropy(self.model(texts[0][batch]), texts[1][batch]).backward()
            optimizer.step()

    def adapters(self) -> dict[str, Tensor]:
        """Return what is trained, and all that travels."""
        state = self.model.state_dict()
        return {name: tensor.clone() for name, tensor in state.items() if "lora_" in name}

    def train(self, node: int, seed: int, rate: float) -> float:
        """Train the adapters on a node's text; return the mean loss."""
        inputs, targets = self.nodes[node]
        random = torch.Generator().manual_seed(seed)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate)
        losses = []
        for _ in range(self.steps):
            batch = torch.randint(len(inputs), (self.batch_size,), generator=random)
            optimizer.zero_grad()
            loss = token_cross_entropy(self.model(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    @torch.no_grad()
    def test(self) -> float:
        """Return the loss on text that no node has."""
        return token_cross_entropy(self.model(self.held_out[0]), self.held_out[1]).item()


def cut(texts: list[str], alphabet: dict[str, int]) -> tuple[Tensor, Tensor]:
    inputs, targets = text_windows(texts, alphabet)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def make_client(task: Task, mods: list[Any]) -> ClientApp:
    """Return an ordinary app of Flower."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = message.content["config"]
        node, number = int(context.node_config["partition-id"]), int(config["server-round"])
        task.model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        part = math.cos(math.pi * number / int(context.run_config["rounds"]))
        rate = LEAST_RATE + (MOST_RATE - LEAST_RATE) * (1 + part) / 2
        loss = task.train(node, 1000 * number + node, rate)
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(task.nodes[node][0])})
        content = RecordDict({"arrays": ArrayRecord(task.adapters()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


class CountingGrid(MemoryGrid):
    """Counts as FlowerTune does, where messages leave and arrive."""

    up = down = first_down = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.down += count_bytes(messages)
        new = [m for m in messages if m.metadata.dst_node_id not in self.contexts]
        self.first_down += count_bytes(new)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        self.up += count_bytes(replies)
        return replies

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002
    ) -> Iterable[Message]:
        return self.pull_messages(set(self.push_messages(messages)))


def count_bytes(messages: list[Message]) -> int:
    return sum(r.count_bytes() for m in messages if m.has_content() for r in m.content.values())


def measure(task: Task, options: argparse.Namespace, has_lines: bool) -> dict[str, Any]:
    """Run the app; return its bytes and losses."""
    random.seed(0)
    losses, started = {}, time.process_time()

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number % TEST_EVERY == 0 or number == options.rounds:
            task.model.load_state_dict(arrays.to_torch_state_dict(), strict=False)
            losses[number] = task.test()
            print(f"lines {has_lines}, round {number}: {losses[number]:.4f}", flush=True)
        return MetricRecord({})

    with tempfile.TemporaryDirectory() as directory:
        os.environ["AQG_STATE_DIR"] = directory
        app = make_client(task, [aqg_mod] if has_lines else [])
        nodes = {100 + node: {"partition-id": node} for node in range(NUM_NODES)}
        grid = CountingGrid(app, nodes, {"rounds": options.rounds})
        strategy = FedAvg(
            fraction_train=PER_ROUND / NUM_NODES,
            min_train_nodes=PER_ROUND,
            min_available_nodes=NUM_NODES,
            fraction_evaluate=0.0,
        )
        if has_lines:
            strategy = Compressed(strategy, recipe=options.recipe)
        strategy.start(
            grid, ArrayRecord(task.first), num_rounds=options.rounds, evaluate_fn=evaluate
        )
    return {
        "name": "with the two lines" if has_lines else "as it is",
        "up": grid.up / MB,
        "down": grid.down / MB,
        "first": grid.first_down / MB,
        "asked": len(grid.contexts),
        "losses": losses,
        "seconds": time.process_time() - started,
    }


def report(task: Task, options: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    count = f"{options.rounds} rounds"
    command = "python benchmarks/flowertune.py"
    for name, usual in DEFAULTS.items():
        if getattr(options, name) != usual:
            command += f" --{name.replace('_', '-')} {getattr(options, name)}"
    lines = [
        "# A LoRA app shaped like FlowerTune's",
        "",
        f"A frozen decoder of {task.num_base:,} parameters, adapters of {task.num_adapters:,} "
        f"(rank {RANK} on queries and values), {PER_ROUND} of {NUM_NODES} nodes in each of {count} "
        f"(`{command}`). MB are 1,024² bytes, summed as FlowerTune's counter does, here over all "
        "records that leave and arrive; its budget is 200,000 MB. The loss is of characters in "
        f"text that no node has; it is {rows[0]['losses'][0]:.3f} before training.",
        "",
        f"| app | communication, {count} | up | down | of it first models | loss | CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        loss = row["losses"][options.rounds]
        lines.append(
            f"| {row['name']} | {row['up'] + row['down']:,.1f} MB | {row['up']:,.1f} MB | "
            f"{row['down']:,.1f} MB | {row['first']:,.1f} MB, {row['asked']} nodes | {loss:.3f} | "
            f"{row['seconds']:.0f} |"
        )
    before, after = (row["up"] + row["down"] for row in rows)
    shown = (", ".join(f"{x:.3f}" for x in row["losses"].values()) for row in rows)
    lines += [
        "",
        f"{before / after:.1f} times less. The loss in rounds "
        f"{', '.join(map(str, rows[0]['losses']))}: {next(shown)} as it is, {next(shown)} with the "
        "two lines. One seed; both runs ask the same nodes, which draw the same batches.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
