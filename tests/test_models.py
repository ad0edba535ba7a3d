"""Built-in modules: shapes in and out, and who sees what. Models as files with their own names."""

import numpy as np
import pytest
import torch
from torch import nn

import aqg
from aqg.errors import ConfigError, RunError
from aqg.models import DataShape, make_module
from aqg.models.nets import default_loss, token_cross_entropy
from aqg.weights import read_tensors, to_bytes

from tests.modules import normalized


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


@pytest.mark.parametrize(("norm", "kind"), [("group", nn.GroupNorm), ("batch", nn.BatchNorm2d)])
def test_resnets_normalize_as_told(norm, kind):
    layers = list(make_module(f"resnet8:norm={norm}", images(32, 32, 3), seed=0).modules())
    assert sum(isinstance(layer, kind) for layer in layers) == 9
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in layers) == 8 + 2  # shortcuts


def test_the_transformer_does_not_look_ahead():
    shape = DataShape((12,), (12,), 0, num_tokens=20)
    module = make_module("transformer:width=16:heads=2", shape, seed=0)
    tokens = torch.randint(20, (3, 12))
    logits = module(tokens)
    assert logits.shape == (3, 12, 20)
    tokens[:, 7:] = 0
    assert torch.allclose(module(tokens)[:, :7], logits[:, :7], atol=1e-6)


def test_a_seed_is_all_that_decides_not_where_colors_are():
    state = torch.get_rng_state()
    shape = images(8, 8)
    first, again, other = (make_module("cnn", shape, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.conv1.weight, again.conv1.weight)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)

    first = make_module("resnet8", images(3, 8, 8), seed=0)
    last = make_module("resnet8", images(8, 8, 3), seed=0)
    batch = torch.rand(2, 3, 8, 8)
    assert torch.equal(first(batch), last(batch.movedim(1, -1)))


def test_losses_suit_the_targets():
    logits, tokens = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    whole = nn.functional.cross_entropy(logits.movedim(-1, 1), tokens)
    assert torch.allclose(token_cross_entropy(logits, tokens), whole)
    assert default_loss(tokens.numpy()) is token_cross_entropy
    several = torch.tensor([[0.0, 1.0], [1.0, 1.0]]).numpy()
    assert default_loss(several) is nn.functional.binary_cross_entropy_with_logits
    assert default_loss(several / 2) is nn.functional.mse_loss


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(to_bytes(normalized().state_dict(), {"rounds": 7, "measure": "loss"}))
    return path


def test_state_dicts_are_read_without_running_code(tmp_path, saved):
    torch.save(normalized().state_dict(), tmp_path / "plain.pt")
    torch.save({"state_dict": normalized().state_dict(), "epoch": 3}, tmp_path / "nested.pt")
    for name in ("plain.pt", "nested.pt"):
        assert set(read_tensors(tmp_path / name)) == set(normalized().state_dict())
    torch.save(normalized(), tmp_path / "whole.pt")  # a pickled class
    torch.save({"weight": [1, 2]}, tmp_path / "lists.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "noise.pt").write_bytes(b"noise")
    (tmp_path / "cut.safetensors").write_bytes(saved.read_bytes()[:-9])
    for name, message in {
        "whole.pt": "can be read without running code .*torch.save",
        "lists.pt": "holds 'weight', a list and no tensor",
        "list.pt": "holds a list, not a state_dict",
        "empty.pt": "is empty",
        "noise.pt": "neither a .safetensors file nor a state_dict",
        "cut.safetensors": "no whole safetensors file",
        "nowhere.pt": "cannot be read: No such file",
    }.items():
        with pytest.raises(ConfigError, match=message) as caught:
            read_tensors(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3)), "has a tensor '1.bias', which the model does not have"),
        (nn.Sequential(*normalized(), nn.Linear(2, 2)), "has no tensor '3.weight', which the"),
        (
            nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)),
            r"tensor '0.weight' of .* has shape \(3, 4\); the model needs \(5, 4\)",
        ),
    ],
)
def test_another_architecture_is_refused_by_name(saved, module, message):
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        aqg.load_model(saved, module)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_is_no_model_is_refused(tmp_path, saved):
    state = normalized().state_dict()
    state["0.weight"][1, 2] = float("nan")
    (tmp_path / "nan.safetensors").write_bytes(to_bytes(state, {}))
    with pytest.raises(ConfigError, match=r"tensor '0.weight' of .* holds NaN or infinity"):
        aqg.load_model(tmp_path / "nan.safetensors", normalized())
    with pytest.raises(RunError, match=r"has no best.safetensors"):
        aqg.load_model(tmp_path)
    with pytest.raises(ConfigError, match="which is 'first'; choose from final, best"):
        aqg.load_model(saved, which="first")


def test_tied_weights_and_half_precision_survive(tmp_path):
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).bfloat16()
    module[1].weight = module[0].weight
    path = tmp_path / "model.safetensors"
    path.write_bytes(to_bytes(module.state_dict(), {}))
    assert aqg.load_model(path)["1.weight"].dtype == np.float32
    other = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).bfloat16()
    assert torch.equal(aqg.load_model(path, other)[1].weight, module[0].weight)
