"""The network, its data, and how it is trained and tested."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 32
NUM_TEST = 897


class Net(nn.Module):
    """Two convolutions and two linear layers on 8 × 8 images: 283,786 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 256)
        self.output = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images, ``(n, 1, 8, 8)``."""
        features = functional.relu(self.conv1(images))
        features = functional.max_pool2d(functional.relu(self.conv2(features)), 2)
        return self.output(functional.relu(self.hidden(features.flatten(1))))


def load_data(partition: int, num_partitions: int, alpha: float = 0.0) -> DataLoader:
    """Return one client's share of the training images.

    They are dealt evenly, or, with ``alpha`` above 0, by labels with a partitioner of
    flwr-datasets: the smaller ``alpha``, the fewer kinds of digits a client has.
    """
    images, labels = _split(train=True)
    if not alpha:
        return _loader(images[partition::num_partitions], labels[partition::num_partitions])
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(num_partitions, partition_by="label", alpha=alpha)
    rows = {"label": labels.tolist(), "place": list(range(len(labels)))}
    partitioner.dataset = Dataset.from_dict(rows)
    places = torch.tensor(partitioner.load_partition(partition)["place"][:])
    return _loader(images[places], labels[places])


def load_test_data() -> DataLoader:
    """Return the images that no client holds."""
    return _loader(*_split(train=False))


def _split(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    chosen = order[NUM_TEST:] if train else order[:NUM_TEST]
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[chosen], torch.tensor(digits.target)[chosen]


def _loader(images: torch.Tensor, labels: torch.Tensor) -> DataLoader:
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH_SIZE, shuffle=True)


def train(net: nn.Module, loader: DataLoader, epochs: int, learning_rate: float) -> float:
    """Train ``net`` in place and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9)
    net.train()
    losses = []
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader) -> float:
    """Return the fraction of images that ``net`` gets right."""
    net.eval()
    right = sum((net(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return right / len(loader.dataset)
