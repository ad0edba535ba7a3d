"""What the simulator asks of a model and its loss, and the models with a hand-written gradient.

One implementation of these serves NumPy and torch: it uses only operations that both spell alike,
from the module that `namespace` returns. Every product is a stacked ``@`` that runs one matrix
product per client, and every sum runs within one client: on NumPy the numbers of a client are the
same to the last bit whichever clients it is stacked with (for features laid out alike in memory).
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

import numpy as np

from aqg.core.types import Float64Array
from aqg.errors import ConfigError, DataError, require
from aqg.jit import njit
from aqg.models import MODULES
from aqg.settings import require_choice
from aqg.spec import make_named

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Any
"""A NumPy array, or a torch tensor on any device; results are of the kind that came in."""

Layout: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of every tensor of a model, in the order they lie in the flat vector."""

Scaling: TypeAlias = Literal["mean", "sum"]


class Learner(Protocol):
    def losses_and_gradients(
        self, params: Array, features: Array, labels: Array
    ) -> tuple[Array, Array]: ...


class Objective(ABC):
    """The loss ``f_m(θ)`` of a client and its gradient, as functions of a flat ``θ``.

    Shapes: ``params`` is ``(num_params,)``, the same model for every client; ``features`` is
    ``(..., n, num_features)`` and ``labels`` ``(..., n)``, integers from 0 to ``num_classes - 1``,
    where the leading axes, if any, count clients with ``n`` samples each. Parameters and features
    share one floating dtype, which is that of the results as well.

    Attributes:
        name: the form `make_objective` takes, or what `from_module` was told.
        layout: the tensors ``θ`` is made of.
        num_params: the length of ``θ``.
        l2: the weight λ of the regularizer.
        convex: whether ``f_m`` is strongly convex, with modulus ``l2``.
        stackable: whether a client's numbers on NumPy are the same to the last bit, alone or
            stacked with others.
        takes_integers: whether features may be integers, such as tokens.
    """

    stackable: bool = True
    takes_integers: bool = False

    def __init__(self, name: str, layout: Layout, l2: float, *, convex: bool) -> None:
        self.name = name
        self.layout = layout
        self.num_params = sum(math.prod(shape) for _, shape in layout)
        self.l2 = l2
        self.convex = convex

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {self.num_params} parameters, l2={self.l2}>"

    @staticmethod
    def from_module(
        module: torch.nn.Module,
        loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
        **options: Any,
    ) -> Objective:
        """Make an objective of any torch module; the module is copied and never changed.

        Args:
            module: takes a batch of samples, returns one row of outputs for each.
            loss: the mean loss of a batch, from outputs and labels; by default cross-entropy.
            options: any of the following.
            input_shape: the shape of a sample as the module sees it, such as ``(1, 28, 28)``;
                by default a sample is its row of features.
            l2: the weight λ of the regularizer.
            scaling: ``"mean"``, or ``"sum"`` for ``n`` times the mean over ``n`` samples.
            name: how messages call it.
            reset: start from parameters that the layers' ``reset_parameters`` draw from the seed,
                and not, whatever the seed, from those the module has now.
            include: name patterns of the parameters that are trained, such as ``"*.lora_*"``; by
                default all that require a gradient.
            exclude: name patterns of parameters and buffers that stay as they are.
            statistics: what becomes of buffers that training changes, such as the running
                statistics of batch normalization: ``"average"`` over the clients, ``"local"`` to
                each, or ``"frozen"``.
        """
        from aqg.objectives.module import ModuleObjective  # needs torch

        return ModuleObjective(module, loss, **options)

    @abstractmethod
    def init_params(self, seed: int) -> Float64Array:
        """Return the parameters a run starts from; the same seed gives the same ones."""

    @abstractmethod
    def losses(self, params: Array, features: Array, labels: Array) -> Array:
        """Return the loss of each client, shape ``(...)``."""

    @abstractmethod
    def losses_and_gradients(
        self, params: Array, features: Array, labels: Array
    ) -> tuple[Array, Array]:
        """Return the loss of each client, ``(...)``, and its gradient, ``(..., num_params)``."""

    @abstractmethod
    def predict(self, params: Array, features: Array) -> Array:
        """Return the most likely label of each sample, shape ``(..., n)``."""

    def require_repeatable(self) -> None:  # noqa: B027  (most have nothing to refuse)
        """Raise `ConfigError` where gradients are not a function of ``θ`` and samples alone."""

    def session(self, key: Sequence[int]) -> AbstractContextManager[Learner]:  # noqa: ARG002
        """Train one client on minibatches; ``key`` is (seed, client, round)."""
        return nullcontext(self)

    def for_samples(self, shape: tuple[int, ...]) -> Objective:
        """Return the objective for samples of this shape: a row of features, unless it says so."""
        if len(shape) != 1:
            raise ConfigError(f"{self.name} takes rows of features, not samples of shape {shape}")
        return self

    def test_batches(
        self, params: Array, features: Array, labels: Array
    ) -> Iterator[tuple[Any, Any]]:
        """Yield outputs and targets of one set of samples, batch by batch, for metrics."""
        yield self.predict(params, features), labels

    def views(self) -> Sequence[AbstractContextManager[None]]:
        """Return a context for each model to be measured: one, where all clients have the same."""
        return [nullcontext()]


def check_loss_settings(l2: float, scaling: str) -> None:
    require(math.isfinite(l2) and l2 >= 0, "l2", l2, "finite and at least 0")
    require_choice("scaling", scaling, get_args(Scaling))


Arrays = list[Array]
"""The tensors of a layout, in order."""


def namespace(array: Array) -> Any:
    """Return the module whose functions fit ``array``: ``numpy`` or ``torch``."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def transpose(array: Array) -> Array:
    return array.swapaxes(-1, -2)


class ClosedForm(Objective):
    """An objective given by the loss of each sample and the gradient of their weighted sum.

    Subclasses see the parameters as the tensors of their layout and need not know about scaling,
    regularization or the flat vector.
    """

    is_convex = True
    """Whether the loss is without a regularizer."""

    def __init__(
        self, name: str, layout: Layout, num_features: int, l2: float, scaling: Scaling
    ) -> None:
        super().__init__(name, layout, l2, convex=self.is_convex and l2 > 0)
        self.num_features = num_features
        self.scaling = scaling

    def init_params(self, seed: int) -> Float64Array:
        """Draw weights uniformly within ``±sqrt(6 / (fan_in + fan_out))`` (Glorot), biases zero."""
        require(seed >= 0, "seed", seed, "at least 0")
        random = np.random.default_rng(seed)
        params = np.zeros(self.num_params)
        for tensor in self.tensors(params):
            if tensor.ndim == 2:
                bound = math.sqrt(6 / sum(tensor.shape))
                tensor[:] = random.uniform(-bound, bound, tensor.shape)
        return params

    # Overflow is how divergence looks, and shows in the results: no warning is due.
    @np.errstate(over="ignore", invalid="ignore")
    def losses(self, params: Array, features: Array, labels: Array) -> Array:
        self._check(params, features, labels)
        samples = self._sample_losses(self.tensors(params), features, labels)
        return self._client_losses(params, samples)

    @np.errstate(over="ignore", invalid="ignore")
    def losses_and_gradients(
        self, params: Array, features: Array, labels: Array
    ) -> tuple[Array, Array]:
        self._check(params, features, labels)
        weight = self.sample_weight(features.shape[-2])
        samples, gradients = self._samples_and_gradients(params, features, labels, weight)
        if self.l2:
            gradients += self.l2 * params
        return self._client_losses(params, samples), gradients

    @np.errstate(over="ignore", invalid="ignore")
    def weighted_losses_and_gradients(
        self, params: Array, features: Array, labels: Array, weights: Array
    ) -> tuple[Array, Array]:
        """Return ``Σ_i w_i loss_i`` for weights ``(..., n)``, and its gradient; no regularizer.

        With classes, each client may have a model of its own: ``params`` is ``(num_params,)`` or
        ``(..., num_params)``.
        """
        one = params if params.ndim == 1 else params[(0,) * (params.ndim - 1)]
        self._check(one, features, labels)
        if params.ndim > 1 and params.shape[:-1] != features.shape[:-2]:
            raise ConfigError(
                f"parameters have shape {tuple(params.shape)}; features of shape "
                f"{tuple(features.shape)} need ({self.num_params},) or one such row per client"
            )
        samples, gradients = self._samples_and_gradients(params, features, labels, weights)
        return (weights * samples).sum(axis=-1), gradients

    def _samples_and_gradients(
        self, params: Array, features: Array, labels: Array, weight: Array
    ) -> tuple[Array, Array]:
        gradients = namespace(features).empty(
            (*features.shape[:-2], self.num_params), dtype=features.dtype, device=features.device
        )
        tensors, slots = self.tensors(params), self.tensors(gradients)
        return self._backpropagate(tensors, features, labels, weight, slots), gradients

    @np.errstate(over="ignore", invalid="ignore")
    def predict(self, params: Array, features: Array) -> Array:
        self._check(params, features)
        return self._predict(self.tensors(params), features)

    @abstractmethod
    def _sample_losses(self, tensors: Arrays, features: Array, labels: Array) -> Array:
        """Return the loss of each sample, shape ``(..., n)``."""

    @abstractmethod
    def _backpropagate(
        self, tensors: Arrays, features: Array, labels: Array, weight: Array, gradients: Arrays
    ) -> Array:
        """Return the loss of each sample; write the gradients of ``weight`` times their sum.

        ``weight`` is a number, or one per sample, ``(..., n)``.
        """

    @abstractmethod
    def _predict(self, tensors: Arrays, features: Array) -> Array:
        """Return the most likely label of each sample, shape ``(..., n)``."""

    def tensors(self, flat: Array) -> Arrays:
        views, start = [], 0
        for _, shape in self.layout:
            stop = start + math.prod(shape)
            views.append(flat[..., start:stop].reshape((*flat.shape[:-1], *shape)))
            start = stop
        return views

    def _client_losses(self, params: Array, samples: Array) -> Array:
        losses = self.sample_weight(samples.shape[-1]) * samples.sum(axis=-1)
        return losses + self.l2 / 2 * (params @ params) if self.l2 else losses

    def sample_weight(self, num_samples: int) -> float:
        """Return ``w``: what each of so many samples counts in its client's loss."""
        if self.scaling == "sum":
            return 1.0
        if num_samples == 0:
            raise DataError("a client has 0 samples; a mean loss needs at least 1")
        return 1 / num_samples

    def _check(self, params: Array, features: Array, labels: Array = None) -> None:
        if params.shape != (self.num_params,):
            raise ConfigError(
                f"parameters have shape {tuple(params.shape)}; {self.name} on "
                f"{self.num_features} features needs ({self.num_params},)"
            )
        if features.ndim < 2 or features.shape[-1] != self.num_features:
            raise ConfigError(
                f"features have shape {tuple(features.shape)}; {self.name} needs "
                f"(..., samples, {self.num_features})"
            )
        if params.dtype != features.dtype:
            raise ConfigError(
                f"parameters are {params.dtype} and features {features.dtype}; they must agree"
            )
        if labels is not None and labels.shape != features.shape[:-1]:
            raise ConfigError(
                f"labels have shape {tuple(labels.shape)}; features of shape "
                f"{tuple(features.shape)} need {tuple(features.shape[:-1])}"
            )


_NARROW = 32
"""Up to this many outputs a product counts as narrow."""
_PIECES = (8, 6, 5, 4, 3, 2)
_PIECE_LENGTH = 512
"""On CUDA, few outputs keep few cores busy: clients are cut into pieces of this many samples."""


class _Classes(ClosedForm):
    """The cross-entropy of a linear layer, on the features or on one hidden layer of them."""

    def _logits(self, tensors: Arrays, features: Array) -> tuple[Array, Array]:
        """Return what goes into the last layer, and what comes out of it, ``(..., C, n)``."""
        inputs = features
        if len(tensors) > 2:
            inputs = features @ tensors[0]
            inputs += tensors[1][..., None, :]
            inputs = namespace(inputs).clip(inputs, 0, None, out=inputs)
        return inputs, class_logits(inputs, *tensors[-2:])

    def _sample_losses(self, tensors: Arrays, features: Array, labels: Array) -> Array:
        return cross_entropy(self._logits(tensors, features)[1], labels)[0]

    def _backpropagate(
        self, tensors: Arrays, features: Array, labels: Array, weight: Array, gradients: Arrays
    ) -> Array:
        inputs, logits = self._logits(tensors, features)
        losses, class_slopes = cross_entropy(logits, labels)
        class_slopes *= weight if isinstance(weight, float) else weight[..., None, :]
        slopes = transpose(class_slopes)
        write_layer_gradients(inputs, slopes, *gradients[-2:])
        if len(tensors) > 2:
            hidden_slopes = slopes @ transpose(tensors[2])
            hidden_slopes *= inputs > 0
            write_layer_gradients(features, hidden_slopes, *gradients[:2])
        return losses

    def _predict(self, tensors: Arrays, features: Array) -> Array:
        return self._logits(tensors, features)[1].argmax(axis=-2)


class Softmax(_Classes):
    """``loss(W, b; x, y) = log Σ_c exp(z_c) - z_y`` with the logits ``z = x W + b``."""

    def __init__(self, num_features: int, num_classes: int, l2: float, scaling: Scaling) -> None:
        layout = (("weight", (num_features, num_classes)), ("bias", (num_classes,)))
        super().__init__("softmax", layout, num_features, l2, scaling)


class Perceptron(_Classes):
    """The cross-entropy of the logits ``max(x W₁ + b₁, 0) W₂ + b₂``."""

    is_convex = False

    def __init__(
        self, num_features: int, num_hidden: int, num_classes: int, l2: float, scaling: Scaling
    ) -> None:
        hidden = (("weight1", (num_features, num_hidden)), ("bias1", (num_hidden,)))
        layout = (*hidden, ("weight2", (num_hidden, num_classes)), ("bias2", (num_classes,)))
        super().__init__(f"mlp:{num_hidden}", layout, num_features, l2, scaling)


def class_logits(inputs: Array, weight: Array, bias: Array) -> Array:
    """Return ``inputs @ weight + bias`` with classes before samples, shape ``(..., C, n)``.

    With few classes and many samples, this order makes sums over classes run along whole rows, and
    BLAS computes the product faster in single precision.
    """
    if _is_cuda(inputs) and weight.ndim == 2:  # faster there as one product of all samples
        flat = inputs.reshape(-1, inputs.shape[-1])
        together = namespace(inputs).addmm(bias, flat, weight)
        return transpose(together.reshape(*inputs.shape[:-1], -1))
    logits = transpose(weight) @ transpose(inputs)
    logits += bias[..., None]
    return logits


def cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the loss of each sample, ``(..., n)``, and its derivative in the logits.

    ``loss = log Σ_c exp(z_c) - z_y`` and ``∂loss/∂z_c = exp(z_c) / Σ exp(z) - [c = y]``. The
    logits, ``(..., C, n)``, are overwritten.
    """
    xp = namespace(logits)
    classes = xp.arange(logits.shape[-2], device=labels.device)[:, None]
    is_label = labels[..., None, :] == classes
    logits -= xp.amax(logits, axis=-2, keepdims=True)  # the largest is 0: exp cannot overflow
    label_logits = xp.where(is_label, logits, 0).sum(axis=-2)
    slopes = xp.exp(logits, out=logits)
    totals = slopes.sum(axis=-2)
    slopes /= totals[..., None, :]
    return xp.log(totals) - label_logits, xp.where(is_label, slopes - 1, slopes)


def write_layer_gradients(
    inputs: Array, slopes: Array, weight_gradient: Array, bias_gradient: Array
) -> None:
    xp = namespace(inputs)
    if xp is np and slopes.shape[-1] <= _NARROW:  # up to 1.6 times as fast with outputs as rows
        weight_gradient[...] = transpose(transpose(slopes) @ inputs)
    elif (num_pieces := _num_pieces(inputs, slopes)) > 1:
        shape = (*inputs.shape[:-2], num_pieces, inputs.shape[-2] // num_pieces, -1)
        products = transpose(inputs.reshape(shape)) @ slopes.reshape(shape)
        xp.sum(products, dim=-3, out=weight_gradient)
    else:
        xp.matmul(transpose(inputs), slopes, out=weight_gradient)
    bias_gradient[...] = slopes.sum(axis=-2)


def _num_pieces(inputs: Array, slopes: Array) -> int:
    if not _is_cuda(inputs) or inputs.itemsize > 4 or slopes.shape[-1] > _NARROW:
        return 1
    num_samples = inputs.shape[-2]
    fitting = (p for p in _PIECES if num_samples % p == 0 and num_samples // p >= _PIECE_LENGTH)
    return next(fitting, 1)


def _is_cuda(array: Array) -> bool:
    return getattr(array, "is_cuda", False)


_COMPILED_BYTES = 1 << 20
"""Clients with no more data than this go through the compiled loop; larger ones gain nothing."""


class Logistic(ClosedForm):
    """``loss(θ; x, y) = log(1 + exp(-y x·θ))`` with ``y = -1`` for label 0 and ``+1`` for label 1.

    There is no bias, and a run starts from ``θ = 0``.
    """

    def __init__(self, num_features: int, l2: float, scaling: Scaling) -> None:
        layout = (("weight", (num_features,)),)
        super().__init__("logistic", layout, num_features, l2, scaling)

    def losses(self, params: Array, features: Array, labels: Array) -> Array:
        if not _is_compiled(features):
            return super().losses(params, features, labels)
        return self.losses_and_gradients(params, features, labels)[0]

    def losses_and_gradients(
        self, params: Array, features: Array, labels: Array
    ) -> tuple[Array, Array]:
        if not _is_compiled(features):
            return super().losses_and_gradients(params, features, labels)
        self._check(params, features, labels)
        *clients, num_samples, num_features = features.shape
        losses = np.empty(math.prod(clients), features.dtype)
        gradients = np.empty((len(losses), num_features), features.dtype)
        rows = np.ascontiguousarray(features).reshape(len(losses), num_samples, num_features)
        targets = np.ascontiguousarray(labels).reshape(len(losses), num_samples)
        model, weight = np.ascontiguousarray(params), self.sample_weight(num_samples)
        scores = _score(model, rows)
        decays = np.exp(-np.abs(scores))  # NumPy's own is faster than a compiled loop
        samples, results = (rows, targets, scores, decays), (losses, gradients)
        _write_losses_and_gradients(model, samples, weight, self.l2, results)
        return losses.reshape(clients)[()], gradients.reshape(*clients, num_features)

    def _sample_losses(self, tensors: Arrays, features: Array, labels: Array) -> Array:
        return _losses_and_slopes(features @ tensors[0], labels)[0]

    def _backpropagate(
        self, tensors: Arrays, features: Array, labels: Array, weight: Array, gradients: Arrays
    ) -> Array:
        losses, slopes = _losses_and_slopes(features @ tensors[0], labels)
        slopes *= weight
        namespace(features).matmul(
            transpose(features), slopes[..., None], out=gradients[0][..., None]
        )
        return losses

    def _predict(self, tensors: Arrays, features: Array) -> Array:
        return (features @ tensors[0] > 0) * 1


def _is_compiled(features: Array) -> bool:
    """Tell by the kind and size of a single client, so that stacking clients changes nothing."""
    size = math.prod(features.shape[-2:]) * features.itemsize
    return isinstance(features, np.ndarray) and features.ndim >= 2 and size <= _COMPILED_BYTES


def _losses_and_slopes(scores: Array, labels: Array) -> tuple[Array, Array]:
    """Return ``log(1 + exp(-y s))`` and its derivative in ``s`` for each score ``s = x·θ``."""
    xp = namespace(scores)
    positive = labels > 0
    margins = xp.where(positive, scores, -scores)
    decay = xp.exp(-abs(margins))  # in (0, 1]: no score overflows it
    losses = xp.log1p(decay)
    losses += (-margins).clip(min=0)
    wrongness = xp.where(margins < 0, 1.0, decay) / (1 + decay)  # 1 / (1 + exp(margin))
    return losses, xp.where(positive, -wrongness, wrongness)


_FACTORS = 512
"""So many numbers from 1 to 2 have a product that is in range."""
_SUMS = {"reassoc", "contract", "nsz"}


@njit(fastmath=_SUMS)
def _score(params: Any, features: Any) -> Any:
    num_clients, num_samples, num_features = features.shape
    scores = np.empty((num_clients, num_samples))
    for client in range(num_clients):
        for i in range(num_samples):
            score = features.dtype.type(0)
            for j in range(num_features):
                score += params[j] * features[client, i, j]
            scores[client, i] = score
    return scores


@njit(error_model="numpy", fastmath=_SUMS)
def _write_losses_and_gradients(
    params: Any, samples: Any, weight: Any, l2: Any, results: Any
) -> None:
    (features, labels, scores, decays), (losses, gradients) = samples, results
    num_clients, num_samples, num_features = features.shape
    penalty = 0.0
    for j in range(num_features):
        penalty += l2 / 2 * params[j] * params[j]
        gradients[:, j] = l2 * params[j]
    for client in range(num_clients):
        rows, gradient, slopes = features[client], gradients[client], scores[client]
        total = 0.0
        for start in range(0, num_samples, _FACTORS):
            # Of the product of 1 + exp(-|s|), over 1: one logarithm, and small losses stay precise.
            excess = 0.0
            for i in range(start, min(start + _FACTORS, num_samples)):
                sign = 1.0 if labels[client, i] > 0 else -1.0
                margin, decay = sign * slopes[i], decays[client, i]
                excess = excess * (1.0 + decay) + decay
                total += 0.0 if margin >= 0 else -margin  # NaN counts
                slopes[i] = -weight * sign * (decay if margin >= 0 else 1.0) / (1.0 + decay)
            total += np.log1p(excess)
        for i in range(num_samples):
            slope = features.dtype.type(slopes[i])
            for j in range(num_features):
                gradient[j] += slope * rows[i, j]
        losses[client] = weight * total + penalty


def make_objective(
    spec: str, num_features: int, num_classes: int, l2: float, scaling: Scaling
) -> Objective:
    """Build the objective named ``spec``: ``"logistic"``, ``"softmax"`` or ``"mlp:HIDDEN"``.

    Client ``m`` with ``n`` samples has the loss
    ``f_m(θ) = w Σ_i loss(θ; x_i, y_i) + l2/2 ‖θ‖²``, where ``w`` is ``1/n`` if ``scaling`` is
    ``"mean"`` and 1 if it is ``"sum"``. The regularizer covers every parameter, biases included.

    >>> make_objective("mlp:200", num_features=784, num_classes=10, l2=0.01, scaling="mean").layout
    (('weight1', (784, 200)), ('bias1', (200,)), ('weight2', (200, 10)), ('bias2', (10,)))
    """
    require(num_features >= 1, "the number of features", num_features, "at least 1")
    require(num_classes >= 2, "the number of classes", num_classes, "at least 2")
    check_loss_settings(l2, scaling)

    def logistic() -> Objective:
        if num_classes != 2:
            raise ConfigError(
                f"model 'logistic' needs 2 classes, the data has {num_classes}; use softmax"
            )
        return Logistic(num_features, l2, scaling)

    def perceptron(hidden: int) -> Objective:
        require(hidden >= 1, "option hidden of model 'mlp'", hidden, "at least 1")
        return Perceptron(num_features, hidden, num_classes, l2, scaling)

    makers: dict[str, Callable[..., Objective]] = {
        "logistic": logistic,
        "softmax": lambda: Softmax(num_features, num_classes, l2, scaling),
        "mlp": perceptron,
    }
    return make_named("model", spec, makers, also=tuple(MODULES))
