"""Closed-form gradients against finite differences and automatic differentiation."""

import numpy as np
import pytest

from aqg.objectives import make_objective

torch = pytest.importorskip("torch")

NUM_FEATURES, SCALINGS = 5, ("mean", "sum")
MODELS = [("logistic", 2), ("softmax", 2), ("softmax", 4), ("mlp:6", 3)]
CASES = [(*model, l2, scaling) for model in MODELS for l2 in (0.0, 0.3) for scaling in SCALINGS]


def draw(objective, client_axes, num_classes, num_samples=7):
    random = np.random.default_rng(12)
    params = random.normal(size=objective.num_params)
    features = random.normal(size=(*client_axes, num_samples, NUM_FEATURES))
    labels = random.integers(0, num_classes, (*client_axes, num_samples))
    return params, features, labels


def textbook_losses(model, params, features, labels, l2, scaling, layout):
    """The definition, with torch's own loss functions and a loop over clients."""
    tensors, start = [], 0
    for _, shape in layout:
        stop = start + int(np.prod(shape))
        tensors.append(params[start:stop].reshape(shape))
        start = stop
    losses = []
    for x, y in zip(
        features.reshape(-1, *features.shape[-2:]),
        labels.reshape(-1, labels.shape[-1]),
        strict=True,
    ):
        if model == "logistic":
            loss = torch.nn.functional.softplus(-(2 * y - 1) * (x @ tensors[0])).sum()
        else:
            if model.startswith("mlp"):
                x = torch.relu(x @ tensors[0] + tensors[1])
            loss = torch.nn.functional.cross_entropy(
                x @ tensors[-2] + tensors[-1], y, reduction="sum"
            )
        if scaling == "mean":
            loss = loss / len(y)
        losses.append(loss + l2 / 2 * (params**2).sum())
    return torch.stack(losses).reshape(features.shape[:-2])


@pytest.mark.parametrize("client_axes", [(), (1,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(("model", "num_classes", "l2", "scaling"), CASES)
def test_matches_automatic_differentiation(model, num_classes, l2, scaling, client_axes):
    objective = make_objective(model, NUM_FEATURES, num_classes, l2, scaling)
    arrays = draw(objective, client_axes, num_classes)
    tensors = [torch.from_numpy(array) for array in arrays]

    def definition(params):
        return textbook_losses(model, params, tensors[1], tensors[2], l2, scaling, objective.layout)

    expected_losses = definition(tensors[0]).numpy()
    expected = torch.autograd.functional.jacobian(definition, tensors[0]).numpy()

    losses, gradients = objective.losses_and_gradients(*arrays)
    assert isinstance(gradients, np.ndarray)
    assert gradients.shape == (*client_axes, objective.num_params)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-13)
    np.testing.assert_allclose(gradients, expected, rtol=1e-11, atol=1e-13)
    np.testing.assert_array_equal(objective.losses(*arrays), losses)

    torch_losses, torch_gradients = objective.losses_and_gradients(*tensors)
    assert isinstance(torch_gradients, torch.Tensor)
    np.testing.assert_allclose(torch_losses.numpy(), expected_losses, rtol=1e-13)
    np.testing.assert_allclose(torch_gradients.numpy(), expected, rtol=1e-11, atol=1e-13)
    np.testing.assert_array_equal(objective.losses(*tensors).numpy(), torch_losses.numpy())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("model", "num_classes", "l2", "scaling"), CASES)
def test_cuda_agrees_with_numpy(model, num_classes, l2, scaling):
    objective = make_objective(model, NUM_FEATURES, num_classes, l2, scaling)
    arrays = draw(objective, (3,), num_classes)
    tensors = [torch.from_numpy(array).cuda() for array in arrays]
    losses, gradients = objective.losses_and_gradients(*tensors)
    assert gradients.is_cuda
    expected_losses, expected = objective.losses_and_gradients(*arrays)
    np.testing.assert_allclose(losses.cpu().numpy(), expected_losses, rtol=1e-12)
    np.testing.assert_allclose(gradients.cpu().numpy(), expected, rtol=1e-10, atol=1e-13)
    np.testing.assert_array_equal(
        objective.predict(*tensors[:2]).cpu().numpy(), objective.predict(*arrays[:2])
    )
