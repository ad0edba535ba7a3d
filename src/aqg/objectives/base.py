"""What the simulator asks of a model and its loss, and how a model is named."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from aqg.core.types import Float64Array
from aqg.errors import ConfigError, require
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
    # Imported here because these modules import this one.
    from aqg.objectives.closed_form import Logistic, Perceptron, Softmax

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


def check_loss_settings(l2: float, scaling: str) -> None:
    require(math.isfinite(l2) and l2 >= 0, "l2", l2, "finite and at least 0")
    require_choice("scaling", scaling, get_args(Scaling))
