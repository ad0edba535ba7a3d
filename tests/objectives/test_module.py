"""Torch modules as objectives: right gradients of any module, which is itself left alone."""

import copy
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from aqg.core.recipes import make_recipe
from aqg.errors import ConfigError, DataError
from aqg.objectives import Objective
from aqg.sim.problem import Problem, Samples
from aqg.sim.training import Dropout

from tests.problems import check_engines, check_torch, crossed

torch = pytest.importorskip("torch")
nn = torch.nn

IMAGE = (1, 8, 8)
NUM_PIXELS = 64
RELATIVE = {"float64": 1e-12, "float32": 1e-4}
"""How far stacked clients may be from single ones, against the largest entry."""


def make_cnn():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def cnn_objective(l2=0.0, scaling="mean"):
    return Objective.from_module(make_cnn(), input_shape=IMAGE, l2=l2, scaling=scaling)


def make_samples(num_features, leading=(), dtype="float64", size=9, seed=1):
    random = np.random.default_rng(seed)
    features = random.normal(size=(*leading, size, num_features)).astype(dtype)
    return features, random.integers(0, 3, (*leading, size))


def assert_close(found, expected, dtype):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=RELATIVE[dtype] * scale)


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)


class Branching(OneLayer):
    """Asks for the value of a tensor, which vmap cannot give."""

    def forward(self, inputs):
        outputs = self.linear(inputs)
        return outputs if inputs.sum() > 0 else 2 * outputs


class Counting(OneLayer):
    """Writes to its buffers, in place and by assignment, and uses one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, inputs):
        self.calls += 1
        self.scale = self.scale * 2
        return self.linear(inputs) * self.scale * self.calls


class FunctionalDropout(OneLayer):
    def forward(self, inputs):
        return nn.functional.dropout(self.linear(inputs), 0.5, training=self.training)


class Recurrent(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.cells = nn.LSTM(2, 4, batch_first=True, **options)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.cells(inputs.reshape(len(inputs), 3, 2))[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(self.first(inputs).tanh())


def make_frozen():
    module = make_cnn()
    module[0].requires_grad_(False)
    return module


def make_evaluated():
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    module[1].running_mean += 1  # in evaluation mode it is used
    return module.eval()


@pytest.mark.parametrize(
    ("make", "leading", "scaling"),
    [
        *crossed([make_cnn], [(), (4,), (2, 2), (0,)], ["mean", "sum"]),
        *((make, (2,), "mean") for make in (make_frozen, make_evaluated, Tied)),
    ],
)
def test_gradients_are_those_of_autograd(make, leading, scaling):
    torch.manual_seed(5)
    module, is_cnn = make(), make in (make_cnn, make_frozen)
    shape = {"input_shape": IMAGE} if is_cnn else {}
    objective = Objective.from_module(module, l2=0.1, scaling=scaling, **shape)
    features, labels = make_samples(NUM_PIXELS if is_cnn else 6, leading)
    params = objective.init_params(0)
    losses, gradients = objective.losses_and_gradients(params, features, labels)
    assert losses.shape == leading
    assert gradients.shape == (*leading, objective.num_params)
    np.testing.assert_allclose(objective.losses(params, features, labels), losses, rtol=1e-12)
    predicted = objective.predict(params, features)
    trained = {name: v for name, v in module.double().named_parameters() if v.requires_grad}
    assert [name for name, _ in objective.layout] == list(trained)
    for client in np.ndindex(*leading):
        inputs = torch.from_numpy(features[client])
        outputs = module(inputs.reshape(-1, *IMAGE) if is_cnn else inputs)
        targets = torch.from_numpy(labels[client])
        by_hand = nn.functional.cross_entropy(outputs, targets, reduction=scaling)
        by_hand = by_hand + 0.05 * sum(value.square().sum() for value in trained.values())
        expected = torch.autograd.grad(by_hand, list(trained.values()))
        assert losses[client] == pytest.approx(by_hand.item(), rel=1e-12)
        flat = torch.cat([gradient.reshape(-1) for gradient in expected])
        assert_close(gradients[client], flat.numpy(), "float64")
        np.testing.assert_array_equal(predicted[client], outputs.argmax(1).numpy())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_results_are_of_the_kind_and_precision_that_came_in(kind, dtype):
    objective = cnn_objective(l2=0.1)
    features, labels = make_samples(NUM_PIXELS, (2,), dtype)
    arrays = tuple(map(kind, (objective.init_params(0).astype(dtype), features, labels)))
    losses, gradients = objective.losses_and_gradients(*arrays)
    predicted = objective.predict(*arrays[:2])
    for result in losses, gradients, predicted, objective.losses(*arrays):
        assert type(result) is type(arrays[0])
    assert losses.dtype == gradients.dtype == arrays[0].dtype
    assert np.shape(predicted) == labels.shape
    assert not getattr(gradients, "requires_grad", False)
    params, features, labels = arrays
    loss, gradient = objective.losses_and_gradients(params, features[0], labels[0])
    assert isinstance(loss, np.floating | torch.Tensor)
    assert gradient.dtype == params.dtype


def normalized(layer):
    return nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 3))


MODULES = {
    "cnn": make_cnn,
    "group norm": lambda: normalized(nn.GroupNorm(2, 4)),
    "batch statistics": lambda: normalized(nn.BatchNorm1d(4, track_running_stats=False)),
    "recurrent": Recurrent,
    "branching": Branching,
    "counting": Counting,
    "tied": Tied,
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", MODULES)
def test_stacked_clients_equal_single_ones_up_to_rounding(name, dtype, caplog):
    caplog.set_level(logging.INFO, logger="aqg")
    shape = IMAGE if name == "cnn" else None
    objective = Objective.from_module(MODULES[name](), input_shape=shape, l2=0.1)
    features, labels = make_samples(NUM_PIXELS if shape else 6, (4,), dtype)
    params = objective.init_params(0).astype(dtype)
    losses, gradients = objective.losses_and_gradients(params, features, labels)
    singles = [
        objective.losses_and_gradients(params, *samples)
        for samples in zip(features, labels, strict=True)
    ]
    assert_close(losses, np.array([loss for loss, _ in singles]), dtype)
    assert_close(gradients, np.array([gradient for _, gradient in singles]), dtype)
    assert_close(objective.losses(params, features, labels), losses, dtype)
    if name not in ("recurrent", "branching"):
        assert not caplog.records  # vmap did it
    np.testing.assert_array_equal(
        objective.predict(params, features)[2], objective.predict(params, features[2])
    )


def test_many_large_clients_go_through_in_several_stacks():
    random = np.random.default_rng(1)
    features = random.normal(size=(5, 2, 1 << 19))  # 8 MiB each: two to a stack
    labels = random.integers(0, 2, (5, 2))
    objective = Objective.from_module(nn.Linear(1 << 19, 2))
    params = objective.init_params(0)
    losses, gradients = objective.losses_and_gradients(params, features, labels)
    for client in range(5):
        loss, gradient = objective.losses_and_gradients(params, features[client], labels[client])
        assert loss == pytest.approx(losses[client], rel=1e-12)
        assert_close(gradients[client], gradient, "float64")


def test_where_vmap_fails_a_loop_takes_over_once_and_for_all(caplog):
    caplog.set_level(logging.INFO, logger="aqg")
    objective = Objective.from_module(Branching())
    features, labels = make_samples(6, (4,))
    features[1] = -np.abs(features[1])  # the other branch
    params = objective.init_params(0)
    for _ in range(2):
        losses, gradients = objective.losses_and_gradients(params, features, labels)
        for client in range(4):
            alone = objective.losses_and_gradients(params, features[client], labels[client])
            assert losses[client] == alone[0]
            np.testing.assert_array_equal(gradients[client], alone[1])
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "<ModuleObjective 'module', 21 parameters, l2=0.0> goes through clients one by one, "
        "because vmap failed"
    ]


def test_a_fault_of_the_module_is_no_reason_to_loop(caplog):
    caplog.set_level(logging.INFO, logger="aqg")
    objective = Objective.from_module(nn.Linear(6, 3))
    params = objective.init_params(0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        objective.losses(params, *make_samples(5, (4,)))
    objective.losses(params, *make_samples(6, (4,)))
    assert not caplog.records


@pytest.mark.parametrize("name", ["cnn", "counting", "recurrent"])
def test_the_callers_module_is_left_alone(name):
    module, shape = MODULES[name](), IMAGE if name == "cnn" else None
    before = copy.deepcopy(module.state_dict())
    random_state = torch.get_rng_state()
    objective = Objective.from_module(module, input_shape=shape, reset=True)
    features, labels = make_samples(NUM_PIXELS if shape else 6, (2,))
    params = objective.init_params(7)
    first = objective.losses_and_gradients(params, features, labels)
    objective.predict(params, features)
    again = objective.losses_and_gradients(params, features, labels)
    np.testing.assert_array_equal(first[1], again[1])  # nothing carried over from call to call
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(value.grad is None for value in module.parameters())
    assert all(value.dtype == before[key].dtype for key, value in module.state_dict().items())
    with torch.no_grad():
        for value in module.parameters():
            value.zero_()
    np.testing.assert_array_equal(
        objective.losses_and_gradients(params, features, labels)[1], first[1]
    )


def test_own_loss_and_single_output():
    def squared_hinge(outputs, labels):
        margins = outputs[:, 0] * (2 * labels - 1)
        return (1 - margins).clamp(min=0).square().mean()

    objective = Objective.from_module(nn.Linear(2, 1, bias=False), squared_hinge)
    features, labels = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, 0], np.uint8)
    loss, gradient = objective.losses_and_gradients(np.array([0.5, 0.5]), features, labels)
    assert loss == (0.25 + 2.25) / 2
    np.testing.assert_array_equal(gradient, [-0.5, 1.5])
    np.testing.assert_array_equal(objective.predict(np.array([0.5, -0.5]), features), [1, 0])


def test_starts_from_the_modules_own_parameters_or_from_drawn_ones():
    module = make_cnn()
    own = torch.cat([value.detach().reshape(-1) for value in module.parameters()])
    objective = Objective.from_module(module, input_shape=IMAGE)
    for seed in 0, 1:
        np.testing.assert_array_equal(objective.init_params(seed), own.double().numpy())
    objective = Objective.from_module(module, input_shape=IMAGE, reset=True)
    np.testing.assert_array_equal(objective.init_params(5), objective.init_params(5))
    assert (objective.init_params(5) != objective.init_params(6)).any()
    last_layer = objective.init_params(9)[-51:]
    assert 0.8 / np.sqrt(16) < np.abs(last_layer).max() <= 1 / np.sqrt(16)


def test_arrays_of_any_kind_in_threads():
    objective = cnn_objective()
    params = objective.init_params(0)
    features, labels = make_samples(NUM_PIXELS)

    def gradient(params, features=features):
        return objective.losses_and_gradients(params, features, labels)[1]

    starts = [params * scale for scale in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for found, start in zip(pool.map(gradient, starts), starts, strict=True):
            np.testing.assert_array_equal(found, gradient(start))
    expected = gradient(params)
    for array in params, features, labels:
        array.flags.writeable = False
    backwards = np.ascontiguousarray(features[::-1])[::-1]
    for same in features, backwards, np.asfortranarray(features):
        np.testing.assert_array_equal(gradient(params, same), expected)


NESTED = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), nn.Dropout(0.25)))
INSTANCE = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (NESTED, r"layer '1\.1', Dropout\(p=0\.25.*drops out at random"),
        (Recurrent(num_layers=2, dropout=0.5), r"layer 'cells', LSTM.*drops out at random"),
        (normalized(nn.BatchNorm1d(4)), "layer '1', .*updates running statistics"),
        (normalized(INSTANCE), "layer '1', .*updates running statistics"),
    ],
)
def test_layers_with_random_or_hidden_results_are_refused(module, message):
    objective = Objective.from_module(module)
    with pytest.raises(ConfigError, match=message):
        objective.losses_and_gradients(objective.init_params(0), *make_samples(6))


@pytest.mark.parametrize("leading", [(), (4,)])
def test_randomness_inside_forward_is_refused(leading):
    objective = Objective.from_module(FunctionalDropout(), name="noisy")
    params = objective.init_params(0)
    for _ in range(2):
        with pytest.raises(ConfigError, match="noisy draws random numbers in its forward pass"):
            objective.losses_and_gradients(params, *make_samples(6, leading))
    calm = Objective.from_module(FunctionalDropout().eval())
    calm.losses_and_gradients(params, *make_samples(6, leading))


LINEAR = nn.Linear(6, 3)


def of_what_was_computed():
    linear = nn.Linear(6, 3)
    linear.result = linear.weight * 2  # torch cannot copy it
    return linear


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ("cnn", {}, r"module is a str, not a torch\.nn\.Module"),
        (LINEAR, {"l2": -1}, "l2 is -1; it must be finite and at least 0"),
        (LINEAR, {"scaling": "max"}, "unknown scaling 'max'; choose from mean, sum"),
        (LINEAR, {"input_shape": ()}, "is not a tuple of integers above 0"),
        (LINEAR, {"input_shape": (1, 0)}, "is not a tuple of integers above 0"),
        (nn.ReLU(), {}, "ReLU has 0 parameters that require a gradient"),
        (of_what_was_computed(), {}, "Linear cannot be copied"),
        (
            nn.TransformerEncoderLayer(6, 2, 4, dropout=0.0),
            {"reset": True},
            r"self_attn \(MultiheadAttention\) has none",
        ),
    ],
)
def test_bad_settings_are_named(module, options, message):
    with pytest.raises(ConfigError, match=message):
        Objective.from_module(module, **options)


def test_bad_arguments_are_named():
    objective = cnn_objective()
    params = objective.init_params(0)
    features, labels = make_samples(NUM_PIXELS)
    with pytest.raises(ConfigError, match="seed is -1"):
        objective.init_params(-1)
    for arguments, message in (
        ((params[:3], features, labels), r"parameters have shape \(3,\); module needs"),
        ((params, features[:, :9], labels), r"module needs \(\.\.\., samples, 64\)"),
        ((params.astype(np.float32), features, labels), "are float32 and features float64"),
        ((params, features, labels[:3]), r"labels have shape \(3,\)"),
        ((params, features[:0], labels[:0]), "a client has 0 samples"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            objective.losses_and_gradients(*arguments)
    objective = Objective.from_module(LINEAR, nn.CrossEntropyLoss(reduction="none"))
    for leading in (), (2,):
        with pytest.raises(ConfigError, match=r"loss has shape \(9,\); it must be one number"):
            objective.losses(objective.init_params(0), *make_samples(6, leading))


def image_problem(dtype="float64", unequal=False):
    sizes = [16 + (3 * client if unequal else 0) for client in range(5)]
    samples = (make_samples(NUM_PIXELS, (), dtype, size, seed) for seed, size in enumerate(sizes))
    clients = tuple(Samples(*pair) for pair in samples)
    objective = cnn_objective(l2=0.001)
    return Problem(objective, clients, objective.init_params(0).astype(dtype), clients[0])


@pytest.mark.parametrize(
    ("name", "unequal", "dtype"),
    crossed(["lean", "gd", "onebit"], [False, True], ["float64", "float32"]),
)
def test_fast_equals_reference_bit_for_bit(name, unequal, dtype):
    problem = image_problem(dtype, unequal)
    check_engines(problem, make_recipe(name), 0.02, Dropout(0.3, seed=8), 4, rounds=25)


def test_torch_backend_takes_the_same_decisions():
    check_torch(image_problem(), make_recipe("lean"), 0.02, rounds=25, rel=1e-12)
