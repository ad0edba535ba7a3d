"""A frozen network, its adapters, their data, and how they are trained and tested."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 32
NUM_BASE, NUM_TEST = 600, 397
RANK = 8


class LoRA(nn.Module):
    """A frozen linear layer plus ``x A B``, where ``B`` starts at zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        scale = layer.in_features**-0.5
        self.lora_a = nn.Parameter(scale * torch.randn(layer.in_features, RANK))
        self.lora_b = nn.Parameter(torch.zeros(RANK, layer.out_features))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return what the layer returns, with the correction."""
        return self.layer(inputs) + inputs @ self.lora_a @ self.lora_b


def make_model() -> nn.Module:
    """Return the trained base with fresh adapters: 16,976 of 318,042 parameters are trained."""
    base = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    base.load_state_dict(trained_base())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*(LoRA(m) if isinstance(m, nn.Linear) else m for m in base))


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what is trained, and all that travels."""
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}


@cache
def trained_base() -> dict[str, torch.Tensor]:
    """Train the base on upright images, the same on every machine."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        images, labels = _images(slice(0, NUM_BASE), upright=True)
        optimizer = torch.optim.SGD(base.parameters(), lr=0.1, momentum=0.9)
        for _ in range(60):
            optimizer.zero_grad()
            functional.cross_entropy(base(images), labels).backward()
            optimizer.step()
    return base.state_dict()


def load_data(partition: int, num_partitions: int) -> DataLoader:
    """Return one client's share of the images, which lie on their side."""
    images, labels = _images(slice(NUM_BASE + NUM_TEST, None))
    return _loader(images[partition::num_partitions], labels[partition::num_partitions])


def load_test_data() -> DataLoader:
    """Return images that no client holds."""
    return _loader(*_images(slice(NUM_BASE, NUM_BASE + NUM_TEST)))


def _images(chosen: slice, upright: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))[chosen]
    images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
    images = images if upright else images.rot90(1, (1, 2))
    return images.flatten(1), torch.tensor(digits.target)[order]


def _loader(images: torch.Tensor, labels: torch.Tensor) -> DataLoader:
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH_SIZE, shuffle=True)


def train(model: nn.Module, loader: DataLoader, epochs: int, learning_rate: float) -> float:
    """Train the adapters in place and return the mean loss."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=learning_rate)
    losses = []
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader) -> float:
    """Return the fraction of images that the model gets right."""
    right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return right / len(loader.dataset)
