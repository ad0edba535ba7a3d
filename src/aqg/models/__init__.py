"""Models by name that are torch modules: ``cnn``, ``resnet8`` and ``transformer``.

Logistic and softmax regression and the perceptron are no modules; see `aqg.objectives`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from aqg.data import Dataset
from aqg.errors import ConfigError
from aqg.spec import Code, make_named, seeded

if TYPE_CHECKING:
    from torch import nn

MODULES: dict[str, str] = {
    "cnn": "two convolutions and a linear layer, for images [width=8]",
    "resnet8": "three residual blocks, for images [norm=group, width=16]",
    "transformer": "predicts the next token at every place of a sequence "
    "[width=64, layers=2, heads=4, dropout=0]",
}
"""Built-in modules, with a line about each."""


@dataclass(frozen=True)
class DataShape:
    """What a model may know of the data."""

    input_shape: tuple[int, ...]  # of one sample
    target_shape: tuple[int, ...]  # of one sample's target; ``()`` for a class or a number
    num_classes: int  # 0 where the targets are not classes
    # one more than the largest whole number among samples and targets that are whole numbers; 0
    # where the samples are not
    num_tokens: int

    @staticmethod
    def of(dataset: Dataset) -> DataShape:
        parts = (dataset.features, dataset.labels, dataset.test_features, dataset.test_labels)
        whole = [int(p.max()) for p in parts if p is not None and p.dtype.kind in "iu"]
        num_tokens = 1 + max(whole) if dataset.features.dtype.kind in "iu" else 0
        shapes = dataset.sample_shape, dataset.labels.shape[1:]
        return DataShape(*shapes, dataset.num_classes, num_tokens)


def is_module(spec: str) -> bool:
    """Tell whether a model is a torch module: built in, or made by a function in a file."""
    return spec.partition(":")[0] in MODULES or Code.parse(spec) is not None


def make_module(spec: str, shape: DataShape, seed: int) -> nn.Module:
    """Make the module that ``spec`` names, its parameters drawn from ``seed``."""
    try:
        import torch
    except ImportError:
        raise ConfigError(
            f"model {spec!r} is a torch module: pip install 'aqg[torch]', or use softmax or mlp:200"
        ) from None
    code = Code.parse(spec)
    with seeded(seed):
        module = _built_in(spec, shape) if code is None else code.call(**asdict(shape), seed=seed)
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"model {spec!r} returned {type(module).__name__}, not a torch.nn.Module")
    return module


def _built_in(spec: str, shape: DataShape) -> nn.Module:
    from aqg.models import nets

    makers = {name: getattr(nets, f"make_{name}") for name in MODULES}
    return make_named("model", spec, makers, shape)
