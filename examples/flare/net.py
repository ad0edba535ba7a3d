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


def load_data(site: int, num_sites: int) -> tuple[DataLoader, DataLoader]:
    """Return a site's share of the training images, and the images that no site holds."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(digits.target)[order]
    own = slice(NUM_TEST + site, None, num_sites)
    train = DataLoader(TensorDataset(images[own], labels[own]), BATCH_SIZE, shuffle=True)
    return train, DataLoader(TensorDataset(images[:NUM_TEST], labels[:NUM_TEST]), NUM_TEST)


def train(net: nn.Module, loader: DataLoader) -> None:
    """Train ``net`` in place for an epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    net.train()
    for images, labels in loader:
        optimizer.zero_grad()
        functional.cross_entropy(net(images), labels).backward()
        optimizer.step()


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader) -> float:
    """Return the fraction of images that ``net`` gets right."""
    net.eval()
    right = sum((net(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return right / len(loader.dataset)
