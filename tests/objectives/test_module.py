"""Torch modules as objectives and in rounds: right gradients of any, which is itself left alone."""

import copy
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import make_step
from aqg.errors import ConfigError, DataError
from aqg.objectives import Objective, make_objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.simulation import SimulationState
from aqg.sim.training import Dropout, LocalTraining, Training

from tests.modules import Masked
from tests.problems import check_engines, check_torch, crossed

IMAGE = (1, 8, 8)
NUM_PIXELS = 64
RELATIVE = {"float64": 1e-12, "float32": 1e-4}
"""How far stacked clients may be from single ones, against the largest entry."""


def make_cnn():
    torch.manual_seed(5)
    first = nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU()
    second = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16, 3))


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
        *((make, (2,), "mean") for make in (make_frozen, make_evaluated, Masked)),
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
    "tied": Masked,
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
    clients = zip(features, labels, strict=True)
    singles = [objective.losses_and_gradients(params, *samples) for samples in clients]
    assert_close(losses, np.array([loss for loss, _ in singles]), dtype)
    assert_close(gradients, np.array([gradient for _, gradient in singles]), dtype)
    assert_close(objective.losses(params, features, labels), losses, dtype)
    if name not in ("recurrent", "branching"):
        assert not caplog.records  # vmap did it
    predicted = objective.predict(params, features)
    np.testing.assert_array_equal(predicted[2], objective.predict(params, features[2]))


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
    caplog.clear()  # a fault of the module is no reason to loop
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
    last = objective.losses_and_gradients(params, features, labels)
    np.testing.assert_array_equal(last[1], first[1])


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


MINIBATCHES = Training(LocalTraining(batch_size=8, steps=3, rate=0.1), weighting="samples")
NUM_CLIENTS = 4


class Tokens(nn.Module):
    """Predicts each token from the one before it, with dropout; tied weights and a mask."""

    def __init__(self, vocabulary=7, width=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layer = nn.TransformerEncoderLayer(
            width, 2, 8, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((9, 9), -torch.inf).triu(1))

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = self.mask[:length, :length]
        return self.head(self.layer(self.embedding(tokens), src_mask=mask))


def token_loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Normalized(nn.Module):
    """Batch normalization, dropout, and a buffer of its own that training changes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("constant", torch.full((2,), -torch.inf))

    def forward(self, inputs):
        hidden = self.drop(self.norm(self.first(inputs)).relu())
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * hidden.abs().mean()
        return self.last(hidden / self.scale)


def seeded(make):
    torch.manual_seed(1)
    return make()


def classes(num=NUM_CLIENTS):
    random = np.random.default_rng(0)
    centers = random.normal(size=(3, 5)) * 3
    clients = []
    for client in range(num):
        labels = random.integers(0, 3, 20 + 6 * client)
        clients.append(Samples(centers[labels] + random.normal(size=(len(labels), 5)), labels))
    return tuple(clients)


def problem_of(objective, clients=None, dtype="float64", **options):
    clients = classes() if clients is None else clients
    start = objective.init_params(0).astype(dtype)
    return Problem(objective, clients, start, test=clients[0], **options)


def normalized_problem(statistics="average"):
    return problem_of(Objective.from_module(seeded(Normalized), statistics=statistics))


def token_problem(dtype="float64"):
    clients = []
    for size in (12, 20, 16):
        starts = np.random.default_rng(size).integers(0, 7, (size, 1))
        text = (starts + np.arange(7) * 3) % 7
        clients.append(Samples(text[:, :-1].astype(np.int32), text[:, 1:]))
    objective = Objective.from_module(seeded(Tokens), token_loss, name="tokens")
    return problem_of(objective, tuple(clients), dtype, metrics="accuracy,perplexity")


def run(problem, recipe="gd", rounds=30, step_size=0.08, kind=FastSimulation, **options):
    simulation = kind(problem, make_recipe(recipe), step_size, training=MINIBATCHES, **options)
    return simulation, list(simulation.run_rounds(rounds))


PROBLEMS = {name: partial(normalized_problem, name) for name in ("average", "local", "frozen")}
PROBLEMS["tokens"] = token_problem


@pytest.mark.parametrize(("name", "recipe"), crossed(list(PROBLEMS), ["auto", "qsgd"]))
def test_engine_equals_the_reference_bit_for_bit(name, recipe):
    problem = PROBLEMS[name]()
    arguments = (problem, make_recipe(recipe), 0.08, Dropout(0.2, seed=8), 3)
    reference, fast = check_engines(*arguments, training=MINIBATCHES, rounds=6)
    assert fast.problem.measure(fast.parameters) == reference.problem.measure(reference.parameters)


def test_randomness_is_of_seed_client_and_round_and_not_of_torch():
    problem = normalized_problem()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, _ = run(problem, rounds=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, _ = run(problem, rounds=3)
    other, _ = run(problem, rounds=3, seed=5)
    np.testing.assert_array_equal(first.parameters, again.parameters)
    assert (first.parameters != other.parameters).any()
    module = seeded(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)))
    noisy = problem_of(Objective.from_module(module))

    def gradients(key):
        with noisy.objective.session(key) as session:
            given = (noisy.initial_params, *noisy.clients[0])
            return [session.losses_and_gradients(*given)[1] for _ in range(2)]

    first, second = gradients((0, 1, 2))
    assert (first != second).any()  # batches of one round draw different numbers
    np.testing.assert_array_equal(first, gradients((0, 1, 2))[0])
    for key in (1, 1, 2), (0, 2, 2), (0, 1, 3):
        assert (first != gradients(key)[0]).any()


def test_averaged_statistics_are_those_of_the_clients_with_fedavgs_weights():
    problem = problem_of(Objective.from_module(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))))
    local = LocalTraining(batch_size=1000, rate=0.1)
    training = Training(local, weighting="samples")
    simulation = FastSimulation(problem, make_recipe("signsgd"), 1e-6, training=training)
    records = [simulation.run_round()]
    sizes = [len(client.labels) for client in problem.clients]
    means = [0.1 * client.features.mean(0) for client in problem.clients]
    variances = [0.9 + 0.1 * client.features.var(0, ddof=1) for client in problem.clients]
    buffers = simulation.statistics.buffers()
    mean, variance = (np.average(parts, axis=0, weights=sizes) for parts in (means, variances))
    # A change is off by a third at most: a sign and a power of two.
    assert buffers.values[:5] == pytest.approx(mean, abs=np.abs(means).max() / 3)
    largest = np.abs(np.array(variances) - 1).max()
    assert buffers.values[5:] == pytest.approx(variance, abs=largest / 3)
    assert buffers.counts.tolist() == [1]
    records += [simulation.run_round() for _ in range(60)]
    found = simulation.statistics.buffers().values
    assert found[:5] == pytest.approx(10 * mean, rel=0.1, abs=0.02)
    assert found[5:] == pytest.approx(10 * (variance - 0.9), rel=0.1)
    # mark, flags twice, two exponents, 10 values, one counter, checksum
    for record, value_bytes in (records[0], 2), (records[1], 1):
        assert record.statistics_upload_bytes == 4 * (2 + 2 + 2 + 2 * 3 + 1 + 4)
        assert record.statistics_download_bytes == 4 * (2 + 2 + 2 + 10 * value_bytes + 1 + 4)
        assert record.upload_bytes > record.statistics_upload_bytes


@pytest.mark.parametrize("kind", [ReferenceSimulation, FastSimulation])
def test_the_mean_of_the_models_is_measured_with_that_of_their_statistics(kind):
    problem = normalized_problem()
    training = replace(MINIBATCHES, step=make_step("dog"))
    arguments = (problem, make_recipe("auto"), 0.1, None, 3)
    simulation, restored = (kind(*arguments, training=training) for _ in range(2))
    list(simulation.run_rounds(6))
    now, mean = simulation.statistics.buffers(), simulation.statistics.averaged()
    assert np.count_nonzero(now.values != mean.values) >= 12  # of batch normalization
    objective = simulation.problem.objective
    features, labels = problem.clients[0]
    with simulation.statistics.of_client(0):
        loss_now = objective.losses(simulation.parameters, features, labels)
    by_mean = objective.predict(simulation.averaged, features)
    module = copy.deepcopy(objective.module)
    objective.model_layout.load(module, simulation.averaged)
    objective.model_layout.write_buffers(module, mean)
    outputs = module.eval()(torch.from_numpy(features).float())
    np.testing.assert_array_equal(by_mean, outputs.argmax(1).numpy())
    assert loss_now != objective.losses(simulation.parameters, features, labels)
    restored.restore(SimulationState.from_arrays(simulation.state().to_arrays()))
    for each in simulation, restored:
        each.run_round()
    means = simulation.statistics.averaged(), restored.statistics.averaged()
    for left, right in zip(*means, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("recipe", ["gd", "auto"])
def test_a_buffer_that_training_changes_travels_and_constants_do_not(recipe):
    simulation, records = run(normalized_problem(), recipe, rounds=3)
    layout = simulation.problem.objective.model_layout
    names = [spec.name for spec in layout.statistics]
    buffers = simulation.statistics.buffers()
    place = layout.statistics[names.index("scale")].place
    assert buffers.values[place] != 1
    assert np.isneginf(buffers.values[layout.statistics[names.index("constant")].place]).all()
    first, second = (record.statistics_download_bytes for record in records[:2])
    if recipe == "gd":
        assert second == first + NUM_CLIENTS * (1 + 2)  # the scale: an exponent and a half float
    else:  # an exponent and a byte; of the others, bytes, which were half floats
        num_values = sum(spec.size for spec in layout.statistics if "running" in spec.name)
        assert second == first + NUM_CLIENTS * (1 + 1 - num_values)
    assert all(not record.faults for record in records)


@pytest.mark.parametrize("statistics", ["local", "frozen"])
def test_local_statistics_stay_with_their_client_and_frozen_ones_as_they_are(statistics):
    simulation, records = run(normalized_problem(statistics), rounds=10)
    assert sum(record.statistics_upload_bytes for record in records) == 0
    assert records[-1].loss < records[0].loss
    assert simulation.problem.measure(simulation.parameters)["accuracy"] > 0.5
    if statistics == "frozen":
        assert simulation.statistics.buffers() is None
    else:
        means = [simulation.statistics.buffers(client).values[:6] for client in range(NUM_CLIENTS)]
        assert len({tuple(mean) for mean in means}) == NUM_CLIENTS


def test_exact_gradients_go_on_refusing_before_the_first_round():
    for kind in ReferenceSimulation, FastSimulation:
        with pytest.raises(ConfigError, match=r"layer 'norm', BatchNorm1d.*train on minibatches"):
            kind(normalized_problem(), make_recipe("gd"), 0.1)
    steps = Training(LocalTraining(steps=3))
    with pytest.raises(ConfigError, match=r"layer 'layer.*drops out at random"):
        FastSimulation(token_problem(), make_recipe("gd"), 0.1, training=steps)


def test_token_ids_several_labels_and_images_are_learned():
    problem = token_problem("float32")
    assert problem.objective.num_params == sum(p.numel() for p in Tokens().parameters())
    simulation, _ = run(problem, "lean", rounds=40, step_size=0.2)
    values = simulation.problem.measure(simulation.parameters)
    assert values["accuracy"] > 0.6
    assert 1 < values["perplexity"] < 4

    clients = tuple(Samples(c.features, np.eye(3)[c.labels]) for c in classes())
    loss = nn.functional.binary_cross_entropy_with_logits
    problem = problem_of(Objective.from_module(seeded(lambda: nn.Linear(5, 3)), loss), clients)
    simulation, _ = run(problem, rounds=30)
    assert simulation.problem.measure(simulation.parameters)["accuracy"] > 0.8

    random = np.random.default_rng(3)
    drawn = ((random.normal(size=(10, 2, 4, 4)), random.integers(0, 3, 10)) for _ in range(3))
    clients = tuple(Samples(*samples) for samples in drawn)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3))
    for device in "cpu", "torch:cpu":
        problem = problem_of(Objective.from_module(module), clients)
        simulation = FastSimulation(problem, make_recipe("lean"), 0.05, device=device)
        first, *_, last = (simulation.run_round() for _ in range(10))
        assert last.loss < first.loss


def regression(shape):
    weights = np.arange(5.0)
    targets = [(c.features @ weights / 4).reshape(len(c.labels), *shape) for c in classes()]
    return tuple(Samples(c.features / 4, t) for c, t in zip(classes(), targets, strict=True))


@pytest.mark.parametrize(
    "loss", [nn.functional.mse_loss, nn.MSELoss(), lambda o, t: (o - t).square().mean()]
)
@pytest.mark.parametrize("training", [Training(), MINIBATCHES])
def test_a_regression_that_would_broadcast_is_refused(loss, training):
    problem = problem_of(Objective.from_module(nn.Linear(5, 1), loss), regression(()))
    simulation = FastSimulation(problem, make_recipe("gd"), 0.01, training=training)
    with pytest.raises(ConfigError, match=r"compares shapes \(\d+, 1\) and \(\d+,\)"):
        simulation.run_round()
    right = problem_of(Objective.from_module(nn.Linear(5, 1), loss), regression((1,)))
    simulation = FastSimulation(right, make_recipe("gd"), 0.05, training=training)
    list(simulation.run_rounds(50, evaluate=False))
    values = right.measure(simulation.parameters)
    assert set(values) == {"mse", "r2"}
    assert values["r2"] > 0.9
    assert right.test_accuracy(simulation.parameters) is None


def test_a_loss_that_squeezes_by_itself_is_fine():
    def loss(outputs, targets):
        return nn.functional.mse_loss(outputs.squeeze(-1), targets)

    problem = problem_of(Objective.from_module(nn.Linear(5, 1), loss), regression(()))
    _, records = run(problem, rounds=2, step_size=0.001)
    assert np.isfinite(records[-1].loss)
    assert problem.measure(problem.initial_params) == {}  # mse would broadcast: none is shown


class Several(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.head, self.kind = nn.Linear(5, 3), kind

    def forward(self, inputs):
        logits = self.head(inputs)
        outputs = {"logits": logits, "hidden": inputs}
        return {"dict": outputs, "tuple": (logits, inputs), "other": {"hidden": logits}}[self.kind]


@pytest.mark.parametrize("kind", ["dict", "tuple", "other"])
def test_several_outputs(kind):
    def loss(outputs, labels):
        logits = outputs[0] if kind == "tuple" else outputs.get("logits", outputs["hidden"])
        return nn.functional.cross_entropy(logits, labels)

    problem = problem_of(Objective.from_module(seeded(lambda: Several(kind)), loss))
    simulation, records = run(problem, rounds=40)
    assert records[-1].loss < records[0].loss
    values = problem.measure(simulation.parameters)
    assert values.get("accuracy", 1.0) > 0.7
    assert set(values) == (set() if kind == "other" else {"accuracy"})


def test_statistics_on_another_device():
    cpu, _ = run(normalized_problem(), rounds=4)
    other, _ = run(normalized_problem(), rounds=4, device="torch:cpu")
    np.testing.assert_allclose(other.parameters, cpu.parameters, rtol=1e-9, atol=1e-12)


def test_half_precision_modules_train_with_float32_values():
    module = seeded(Normalized).half()
    clients = tuple(Samples(c.features.astype(np.float16), c.labels) for c in classes())
    objective = Objective.from_module(module)
    problem = problem_of(objective, clients, "float32")
    assert problem.clients[0].features.dtype == np.float32
    simulation, records = run(problem, "auto", rounds=20)
    assert records[-1].loss < records[0].loss
    objective.model_layout.load(module, simulation.parameters)
    assert module.last.weight.dtype == torch.float16
    with pytest.raises(ConfigError, match="initial_params are float16; they must be float32"):
        problem_of(objective, clients, "float16")


def test_bad_problems_are_named():
    objective = Objective.from_module(nn.Linear(5, 3))
    start = objective.init_params(0)
    good = classes()
    with pytest.raises(DataError, match=r"client 1 has 26 features and 25 targets"):
        Problem(objective, (good[0], Samples(good[1].features, good[1].labels[:-1])), start)
    with pytest.raises(DataError, match=r"client 1 has samples of shape \(4,\); those of client 0"):
        Problem(objective, (good[0], Samples(good[1].features[:, :4], good[1].labels)), start)
    with pytest.raises(DataError, match=r"the test set has features of shape \(20,\)"):
        Problem(objective, good, start, Samples(good[0].features[:, 0], good[0].labels))
    with pytest.raises(DataError, match="0 clients"):
        Problem(objective, (), start)
    softmax = make_objective("softmax", 5, 3, 0.0, "mean")
    integers = tuple(Samples(c.features.astype(int), c.labels) for c in good)
    with pytest.raises(DataError, match="features are int64; softmax needs floating-point ones"):
        Problem(softmax, integers, softmax.init_params(0))
    images = tuple(Samples(c.features[:, :4].reshape(-1, 2, 2), c.labels) for c in good)
    with pytest.raises(ConfigError, match=r"softmax takes rows of features, not .* \(2, 2\)"):
        Problem(softmax, images, softmax.init_params(0))
    numbers = Samples(good[0].features, np.linspace(0, 1, 20))
    asked = Problem(objective, good, start, numbers, metrics="accuracy")
    with pytest.raises(ConfigError, match="accuracy needs classes"):
        asked.measure(start)


def test_statistics_beyond_numbers_are_a_named_fault():
    clients = list(classes())
    broken = clients[1].features.copy()
    broken *= 1e200  # squares overflow, however many threads add them up
    clients[1] = Samples(broken, clients[1].labels)
    module = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    problem = problem_of(Objective.from_module(module), tuple(clients))
    _, (record,) = run(problem, rounds=1)
    assert (1, "buffer '0.running_var' holds NaN or infinity after training") in record.faults
