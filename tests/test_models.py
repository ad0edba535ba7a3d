"""The built-in modules: shapes in and out, and who sees what."""

import pytest
import torch
from torch import nn

from aqg.errors import ConfigError
from aqg.models import DataShape, make_module
from aqg.models.nets import default_loss, token_cross_entropy


def images(*shape, num_classes=10, target_shape=()):
    return DataShape(shape, target_shape, num_classes, 0)


@pytest.mark.parametrize("model", ["cnn", "cnn:width=3", "resnet8", "resnet8:norm=batch:width=4"])
@pytest.mark.parametrize("shape", [(64,), (9, 7), (3, 12, 12), (12, 12, 3), (1, 28, 28)])
def test_images_of_any_kind(model, shape):
    module = make_module(model, images(*shape), seed=0)
    assert module(torch.rand(5, *shape)).shape == (5, 10)
    numbers = make_module(model, images(*shape, num_classes=0), seed=0)
    assert numbers(torch.rand(5, *shape)).shape == (5,)
    rows = make_module(model, images(*shape, num_classes=0, target_shape=(4,)), seed=0)
    assert rows(torch.rand(5, *shape)).shape == (5, 4)


def test_colors_first_and_last_are_the_same_image():
    first = make_module("resnet8", images(3, 8, 8), seed=0)
    last = make_module("resnet8", images(8, 8, 3), seed=0)
    batch = torch.rand(2, 3, 8, 8)
    assert torch.equal(first(batch), last(batch.movedim(1, -1)))


def test_resnets_normalize_as_told():
    kinds = {"group": nn.GroupNorm, "batch": nn.BatchNorm2d}
    for norm, kind in kinds.items():
        module = make_module(f"resnet8:norm={norm}", images(32, 32, 3), seed=0)
        assert sum(isinstance(layer, kind) for layer in module.modules()) == 9
        layers = (nn.Conv2d, nn.Linear)
        assert sum(isinstance(layer, layers) for layer in module.modules()) == 8 + 2  # shortcuts


def test_the_transformer_does_not_look_ahead():
    shape = DataShape((12,), (12,), 0, num_tokens=20)
    module = make_module("transformer:width=16:heads=2", shape, seed=0)
    tokens = torch.randint(20, (3, 12))
    logits = module(tokens)
    assert logits.shape == (3, 12, 20)
    tokens[:, 7:] = 0
    assert torch.allclose(module(tokens)[:, :7], logits[:, :7], atol=1e-6)


def test_a_seed_is_all_that_decides():
    state = torch.get_rng_state()
    shape = images(8, 8)
    first, again, other = (make_module("cnn", shape, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.conv1.weight, again.conv1.weight)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        ("cnn", images(63), r"samples of shape \(63,\) are no images"),
        ("resnet8", images(9, 9, 9), r"samples of shape \(9, 9, 9\) are no images"),
        ("cnn:width=0", images(8, 8), "width of model 'cnn' is 0"),
        ("cnn", images(8, 8, num_classes=0, target_shape=(2, 2)), "are too much for model 'cnn'"),
        ("transformer", images(8), "are no sequences"),
        ("transformer:heads=3", DataShape((4,), (4,), 0, 9), "not a multiple of its 3 heads"),
        ("transformer:dropout=1", DataShape((4,), (4,), 0, 9), "dropout of model"),
    ],
)
def test_what_does_not_fit_is_refused(model, shape, message):
    with pytest.raises(ConfigError, match=message):
        make_module(model, shape, seed=0)


def test_losses_suit_the_targets():
    logits, tokens = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    whole = nn.functional.cross_entropy(logits.movedim(-1, 1), tokens)
    assert torch.allclose(token_cross_entropy(logits, tokens), whole)
    assert default_loss(tokens.numpy()) is token_cross_entropy
    several = torch.tensor([[0.0, 1.0], [1.0, 1.0]]).numpy()
    assert default_loss(several) is nn.functional.binary_cross_entropy_with_logits
    assert default_loss(several / 2) is nn.functional.mse_loss
