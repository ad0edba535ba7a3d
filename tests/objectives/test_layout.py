"""What travels of a module: each trainable parameter once, and nothing that is constant."""

import numpy as np
import pytest

from aqg.errors import ConfigError

torch = pytest.importorskip("torch")
nn = torch.nn

from aqg.objectives.layout import ModelLayout  # noqa: E402  (needs torch)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


class Masked(nn.Module):
    """A causal mask with -inf in its saved state, and a cache that is not saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("cache", torch.zeros(7), persistent=False)
        self.register_buffer("positions", torch.arange(4))


def normalized():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_names_shapes_dtypes_offsets_and_values_are_those_of_the_module():
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).double())
    layout = ModelLayout.of(module)
    assert [tuple(spec) for spec in layout.parameters] == [
        ("0.weight", (3, 4), "float32", 0),
        ("0.bias", (3,), "float32", 12),
        ("1.weight", (2, 3), "float64", 15),
        ("1.bias", (2,), "float64", 21),
    ]
    assert layout.dtype == np.float64
    assert not layout.carries_buffers
    flat = layout.flatten(module)
    expected = [value.detach().numpy().ravel() for value in module.parameters()]
    np.testing.assert_array_equal(flat, np.concatenate(expected))
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).double())
    layout.load(other, flat)
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_frozen_parameters_do_not_travel_and_tied_ones_once():
    module = normalized()
    module[0].requires_grad_(False)
    before = module[0].weight.clone()
    layout = ModelLayout.of(module)
    assert layout.num_params == 6 + 8
    layout.load(module, np.ones(layout.num_params, np.float32))
    assert torch.equal(module[0].weight, before)
    tied = Tied()
    layout = ModelLayout.of(tied)
    assert [spec.name for spec in layout.parameters] == ["embedding.weight"]
    layout.load(tied, np.arange(15, dtype=np.float32))
    assert tied.head.weight is tied.embedding.weight
    assert tied.head.weight[4, 2] == 14


def test_patterns_choose_parameters_by_name():
    module = normalized()
    assert ModelLayout.of(module, include="2.*").num_params == 8
    layout = ModelLayout.of(module, include=["0.*", "2.*"], exclude="*.bias")
    assert [spec.name for spec in layout.parameters] == ["0.weight", "2.weight"]
    assert layout.left_out == ("0.bias", "1.bias", "1.weight", "2.bias")
    layout.load(module, layout.flatten(module))  # what is left out is no reason to refuse
    without = ModelLayout.of(module, exclude="*.running_*")
    assert without.statistics == ()
    with pytest.raises(ConfigError, match=r"include pattern 'lora\*' matches none of the 6"):
        ModelLayout.of(module, include="lora*")
    with pytest.raises(ConfigError, match="leave 0 of the 6 trainable parameters"):
        ModelLayout.of(module, exclude="*")


def test_buffers_of_the_saved_state_are_listed_apart_from_parameters():
    layout = ModelLayout.of(normalized())
    assert [spec.name for spec in layout.statistics] == ["1.running_mean", "1.running_var"]
    assert [spec.name for spec in layout.counters] == ["1.num_batches_tracked"]
    assert layout.tracked == (True, True, True)
    masked = ModelLayout.of(Masked())
    assert [spec.name for spec in masked.statistics] == ["mask"]
    assert [spec.name for spec in masked.counters] == ["positions"]
    assert masked.tracked == (False, False)


def test_infinite_buffers_are_no_fault_and_infinite_parameters_are_named():
    module = Masked()
    layout = ModelLayout.of(module)
    assert np.isfinite(layout.flatten(module)).all()
    with torch.no_grad():
        module.linear.bias[1] = torch.nan
    with pytest.raises(ConfigError, match=r"'linear\.bias' \(3,\) holds NaN or infinity in 1 of 3"):
        layout.flatten(module)
    assert np.isnan(layout.flatten(module, finite=False)).sum() == 1


@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.float16, np.float32), (torch.bfloat16, np.float32), (torch.float64, np.float64)],
)
def test_half_precision_has_float32_masters_and_float64_is_not_narrowed(dtype, master):
    module = nn.Linear(4, 3).to(dtype)
    layout = ModelLayout.of(module)
    masters = layout.flatten(module) + master(1e-6)
    assert masters.dtype == layout.dtype == master
    layout.load(module, masters)
    assert module.weight.dtype == dtype
    rounded = torch.from_numpy(masters).to(dtype).double().numpy()
    np.testing.assert_array_equal(layout.flatten(module), rounded)


def test_what_cannot_travel_is_refused_by_name():
    module = nn.Linear(2, 1)
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    twins = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    twins[1].weight = nn.Parameter(twins[0].weight.data)
    for made, options, message in (
        (module, {}, "parameter 'phase' is complex64"),
        (twins, {}, r"'0\.weight' and '1\.weight' share their memory"),
        (nn.LazyLinear(3), {}, "'weight' has no values yet"),
        (
            nn.Linear(2, 1),
            {"statistics": "mean"},
            "unknown statistics 'mean'; choose from average, local, frozen",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelLayout.of(made, **options)


def test_another_architecture_with_equally_many_parameters_is_refused_by_name():
    first = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    second = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
    layout = ModelLayout.of(first)
    assert layout.num_params == ModelLayout.of(second).num_params
    with pytest.raises(ConfigError, match=r"'0\.weight' of Sequential is \(4, 6\) float32"):
        layout.load(second, layout.flatten(first))
    with pytest.raises(ConfigError, match=r"Linear has no tensor '0\.weight'"):
        layout.load(nn.Linear(48, 1, bias=False), layout.flatten(first))
    wider = nn.Sequential(*first, nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"'2\.weight' of Sequential is trainable"):
        layout.load(wider, layout.flatten(first))


def test_buffers_there_and_back():
    module = normalized()
    module(torch.randn(8, 4))
    layout = ModelLayout.of(module)
    buffers = layout.read_buffers(module)
    assert buffers.counts.tolist() == [1]
    other = normalized()
    layout.write_buffers(other, buffers)
    assert torch.equal(other[1].running_var, module[1].running_var)
    assert other[1].num_batches_tracked == 1
    module[1].running_var = torch.ones(4)
    with pytest.raises(ConfigError, match=r"'1\.running_var' of Sequential has shape \(4,\) now"):
        layout.read_buffers(module)
