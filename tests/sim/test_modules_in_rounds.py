"""Ordinary PyTorch models in the simulator: what users have, as they have it."""

import copy
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

from tests.problems import check_engines, crossed

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
    clients = tuple(
        Samples(random.normal(size=(10, 2, 4, 4)), random.integers(0, 3, 10)) for _ in range(3)
    )
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
