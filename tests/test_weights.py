"""Models as files: written with their own names, read back, refused where they do not fit."""

import numpy as np
import pytest
import torch
from torch import nn

import aqg
from aqg.errors import ConfigError, RunError
from aqg.weights import read_notes, read_tensors, to_bytes


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(to_bytes(network().state_dict(), {"rounds": 7, "measure": "loss"}))
    return path


def test_a_module_gets_its_own_tensors_back(saved):
    module = aqg.load_model(saved, network())
    arrays = aqg.load_model(saved)
    assert list(arrays) == sorted(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert np.array_equal(arrays[name], tensor.numpy())
    assert read_notes(saved) == {"rounds": 7, "measure": "loss"}


def test_state_dicts_are_read_without_running_code(tmp_path, saved):
    torch.save(network().state_dict(), tmp_path / "plain.pt")
    torch.save({"state_dict": network().state_dict(), "epoch": 3}, tmp_path / "nested.pt")
    for name in ("plain.pt", "nested.pt"):
        assert set(read_tensors(tmp_path / name)) == set(network().state_dict())
    torch.save(network(), tmp_path / "whole.pt")  # a pickled class
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
        (nn.Sequential(*network(), nn.Linear(2, 2)), "has no tensor '3.weight', which the model"),
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
    state = network().state_dict()
    state["0.weight"][1, 2] = float("nan")
    (tmp_path / "nan.safetensors").write_bytes(to_bytes(state, {}))
    with pytest.raises(ConfigError, match=r"tensor '0.weight' of .* holds NaN or infinity"):
        aqg.load_model(tmp_path / "nan.safetensors", network())
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
