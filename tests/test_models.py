"""Built-in modules, models as files, and a first model, which arrives as the server has it."""

import math
import zlib

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import aqg
from aqg.errors import ConfigError, RunError, WireError
from aqg.models import DataShape, make_module
from aqg.models.nets import Transformer, default_loss, token_cross_entropy
from aqg.objectives.layout import ModelLayout
from aqg.start import (
    CONSTANT,
    NORMAL,
    UNIFORM,
    WAYS,
    Law,
    OtherModelError,
    draw,
    laws_of,
    normal_quantiles,
    pack,
    settle,
    unpack,
)
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


def make_mlp():
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def make_cnn():
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, 10))


def make_transformer():
    return Transformer(num_tokens=80, length=64, width=32, layers=1, heads=2)


def flat(make, seed=0):
    torch.manual_seed(seed)
    module = make()
    layout = ModelLayout.of(module)
    return layout.flatten(module), layout.shapes


def tensors(params, shapes):
    ends = np.cumsum([math.prod(shape) for _, shape in shapes])
    return np.split(params, ends[:-1])


modules = pytest.mark.parametrize("make", [make_mlp, make_cnn, make_transformer])
ways = pytest.mark.parametrize("way", WAYS)


@ways
@modules
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_the_server_starts_from_is_what_arrives(make, dtype, way):
    params, shapes = flat(make)
    params = params.astype(dtype)
    started, message = settle(params, shapes, way, seed=3)
    arrived = unpack(message, len(params), dtype, params)
    assert arrived.dtype == params.dtype
    assert arrived.tobytes() == started.tobytes()
    if way in ("digest", "exact"):
        assert started.tobytes() == params.tobytes()


@modules
@pytest.mark.parametrize("seed", range(5))
def test_drawn_tensors_have_the_mean_and_spread_of_the_modules_own(make, seed):
    params, shapes = flat(make, seed)
    started, message = settle(params, shapes, "seed", seed=seed)
    assert None not in laws_of(params, shapes)
    assert len(message) < 150
    for drawn, own in zip(tensors(started, shapes), tensors(params, shapes), strict=True):
        if own.std() == 0:
            np.testing.assert_array_equal(drawn, own)
            continue
        assert not np.array_equal(drawn, own)
        error = 4.5 * own.std() * math.sqrt(2 / len(own))
        assert abs(drawn.mean() - own.mean()) < error
        assert abs(drawn.std() - own.std()) < error
        assert stats.ks_2samp(drawn, own).pvalue > 1e-4


def test_draws_are_these_bits_and_have_their_law():
    drawn = [draw(Law(kind, 0.0, 0.5), 3, seed=2**40, stream=5) for kind in (UNIFORM, NORMAL)]
    assert np.concatenate(drawn).tobytes().hex() == (
        "000080a16b1cbe3f0000401eab88cc3f000020ba90a1d93f"
        "a48ae45ebb26c33ff8beb11ae6edd23f693a9c179a8ce43f"
    )
    rows = [draw(Law(UNIFORM, 0.0, 1.0), 8, *key) for key in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len({row.tobytes() for row in rows}) == 4  # by seeds and streams
    normal = draw(Law(NORMAL, 1.0, 2.0), 50_000, seed=1, stream=0)
    uniform = draw(Law(UNIFORM, 1.0, 2.0), 50_000, seed=1, stream=1)
    assert stats.kstest(normal, stats.norm(1, 2).cdf).pvalue > 0.01
    assert stats.kstest(uniform, stats.uniform(-1, 4).cdf).pvalue > 0.01
    shares = (np.arange(2**16) + 0.5) / 2**16
    assert np.abs(normal_quantiles(shares) - stats.norm.ppf(shares)).max() < 1e-6


def test_trained_weights_travel():
    """Their marginal distribution may still be that of an initialization."""
    params, shapes = flat(make_mlp)
    trained = params.copy()
    left, right = np.random.default_rng(0).standard_normal((2, 100))
    trained[:6400] += 0.002 * np.outer(left, right[:64]).reshape(-1) * 20
    laws = laws_of(trained, shapes)
    assert laws[0] is None
    assert laws[2] is not None
    started, _ = settle(trained, shapes, "seed")
    assert np.abs(started[:6400] - trained[:6400]).max() < 0.01


def test_measured_laws():
    def make(init):
        module = nn.Linear(50, 40)
        init(module.weight)
        nn.init.constant_(module.bias, -2.5)
        return module

    assert laws_of(*flat(lambda: make(nn.init.orthogonal_)))[0] is None
    weight, bias = laws_of(*flat(lambda: make(lambda own: nn.init.normal_(own, 0.3, 0.07))))
    assert weight.kind == NORMAL
    assert (weight.center, weight.scale) == pytest.approx((0.3, 0.07), abs=0.006)
    assert bias == Law(CONSTANT, -2.5)


@pytest.mark.parametrize("bits", range(2, 9))
def test_rounding_stays_within_half_a_step_of_each_block(bits):
    params, shapes = flat(make_mlp)
    started = unpack(pack(params, shapes, "rounded", bits=bits), len(params), "float32")
    for rounded, exact in zip(tensors(started, shapes), tensors(params, shapes), strict=True):
        for start in range(0, len(exact), 64):
            block = slice(start, start + 64)
            step = np.abs(exact[block]).max() * (1 + 2**-7) / (2 ** (bits - 1) - 1)
            assert np.abs(rounded - exact)[block].max() <= step / 2 * (1 + 1e-6)
    assert len(pack(params, shapes, "rounded", bits=bits)) < len(params) * (bits + 0.3) / 8


def test_zeros_cost_nothing_and_a_tensor_may_have_no_parameters():
    shapes = (("lora_A", (8, 512)), ("lora_B", (512, 8)))
    params = np.zeros(8192, np.float32)
    params[:4096] = np.random.default_rng(0).normal(0, 0.1, 4096)
    whole = len(pack(params, shapes, "rounded", bits=4))  # half of an adapter begins at zero
    half = len(pack(params[:4096], shapes[:1], "rounded", bits=4))
    assert whole < half + 40
    shapes = (("empty", (0, 4)), ("weight", (2,)))
    params = np.array([1.0, -2.0])
    for way in WAYS:
        started, message = settle(params, shapes, way)
        np.testing.assert_allclose(unpack(message, len(params), "float64", params), started)


@ways
def test_damaged_bytes_are_refused(way):
    params, shapes = flat(make_cnn)
    message = pack(params, shapes, way)
    for place in (0, 1, 2, 3, len(message) // 2, len(message) - 1):
        broken = bytearray(message)
        broken[place] ^= 0x40
        for data in bytes(broken), message[:place]:
            with pytest.raises(WireError):
                unpack(data, len(params), "float32", params)


@ways
def test_hostile_bytes_with_a_right_checksum_are_refused_or_read(way):
    params, shapes = flat(make_cnn)
    body = pack(params, shapes, way)[:-4]
    random = np.random.default_rng(0)
    num_refused = 0
    for _ in range(200):
        broken = bytearray(body[: random.integers(2, len(body) + 1)])
        broken[random.integers(0, min(len(broken), 60))] = random.integers(256)
        data = bytes(broken) + zlib.crc32(bytes(broken)).to_bytes(4, "little")
        try:
            assert unpack(data, len(params), "float32", params).shape == params.shape
        except WireError:
            num_refused += 1
    assert num_refused > 150


def test_bad_input_and_another_model_are_named():
    params, shapes = flat(make_mlp)
    for arguments, pattern in (
        ((params, shapes, "post"), "start is 'post'; choose from seed, digest, rounded, exact"),
        ((params[1:], shapes, "seed"), r"shape \(7509,\); the tensors need \(7510,\)"),
        ((params.astype(np.float16), shapes, "seed"), "float16; they must be"),
        ((np.full_like(params, np.nan), shapes, "exact"), "NaN or infinity"),
    ):
        with pytest.raises(ConfigError, match=pattern):
            pack(*arguments)
    with pytest.raises(ConfigError, match="seed -1 is not in"):
        draw(Law(UNIFORM, 0.0, 1.0), 8, -1, 0)
    with pytest.raises(ConfigError, match="9 bits per parameter; there are 2 to 8"):
        pack(params, shapes, "rounded", bits=9)
    with pytest.raises(WireError, match="has 7510 parameters; the one here has 3"):
        unpack(pack(params, shapes, "exact"), 3, "float32")
    params, shapes = flat(make_mlp)
    message = pack(params, shapes, "digest")
    for held in [params + np.float32(1e-3)], []:
        with pytest.raises(OtherModelError, match="another one"):
            unpack(message, len(params), "float32", *held)
