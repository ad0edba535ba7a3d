"""Any `torch.nn.Module` as an objective.

The module is called as a pure function of a flat ``θ``: its parameters are views of ``θ``, and its
buffers are copies that are thrown away after each call, so a gradient depends on ``θ`` and the
samples alone. Stacked clients are differentiated at once by `torch.func.vmap`, or one by one by
plain autograd where that cannot run the module.

One by one, a client's numbers are those of the client alone to the last bit. `vmap` adds up in
another order: they agree to 1e-12 of the largest entry in float64, and to 1e-4 in float32. The
simulator on the CPU, which promises bits, therefore does not stack modules.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from aqg.errors import ConfigError, DataError
from aqg.objectives.base import Array, Layout, Objective, Scaling, check_loss_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

_STACK_BYTES = 1 << 24
"""The most features that are differentiated at once; activations take a multiple of it."""

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

_logger = logging.getLogger(__name__)


class ModuleObjective(Objective):
    """``f_m(θ) = w loss(module_θ(x), y) + l2/2 ‖θ‖²``, where ``loss`` is a mean over ``n`` samples.

    The weight ``w`` is 1 if ``scaling`` is ``"mean"`` and ``n`` if it is ``"sum"``. The layout
    lists the parameters that require a gradient, in the order of ``named_parameters``; others stay
    as they are. `Objective.from_module` explains the arguments.

    >>> objective = ModuleObjective(nn.Linear(4, 3), l2=0.1)
    >>> objective.layout
    (('weight', (3, 4)), ('bias', (3,)))
    >>> features, labels = np.eye(4), np.array([0, 1, 2, 0])
    >>> loss, gradient = objective.losses_and_gradients(np.zeros(15), features, labels)
    >>> round(loss / np.log(3), 9), gradient.shape
    (np.float64(1.0), (15,))
    """

    stackable = False

    # `functional_call` swaps the tensors of the one module: a thread at a time.
    _calling = threading.Lock()

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Tensor], Tensor] | None = None,
        *,
        input_shape: tuple[int, ...] | None = None,
        l2: float = 0.0,
        scaling: Scaling = "mean",
        name: str = "module",
        reset: bool = False,
    ) -> None:
        check_loss_settings(l2, scaling)
        if input_shape is not None and (not input_shape or min(input_shape) < 1):
            raise ConfigError(f"input_shape {input_shape!r} is not a tuple of integers above 0")
        _check_parameters(module)
        _check_layers(module)
        if reset:
            _check_reset(module)
        self._module = _private_copy(module)
        layout: Layout = tuple(
            (key, tuple(value.shape)) for key, value in _trainable(self._module).items()
        )
        super().__init__(name, layout, l2, convex=False)
        self.input_shape = input_shape
        self.scaling = scaling
        self._loss = nn.functional.cross_entropy if loss is None else loss
        self._reset = reset
        self._sizes = [math.prod(shape) for _, shape in layout]
        self._constants: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        self._vectorizes = True
        self._draws_nothing = False

    def init_params(self, seed: int) -> NDArray[np.float64]:
        """Return the module's own parameters or, with ``reset``, new ones drawn from the seed."""
        if seed < 0:
            raise ConfigError(f"seed {seed} is not an integer of at least 0")
        module = self._module
        if self._reset:
            module = copy.deepcopy(module)
            _reset_parameters(module, seed)
        tensors = [tensor.detach().double() for tensor in _trainable(module).values()]
        params: NDArray[np.float64] = torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy()
        return params

    def losses(self, params: Array, features: Array, labels: Array) -> Array:
        """Return the loss of each client, shape ``(...)``."""
        losses, _ = self._evaluate(params, features, labels, differentiate=False)
        return _like(features, losses)

    def losses_and_gradients(
        self, params: Array, features: Array, labels: Array
    ) -> tuple[Array, Array]:
        """Return the loss of each client, ``(...)``, and its gradient, ``(..., num_params)``."""
        losses, gradients = self._evaluate(params, features, labels, differentiate=True)
        return _like(features, losses), _like(features, gradients)

    def predict(self, params: Array, features: Array) -> Array:
        """Return the most likely label of each sample, shape ``(..., n)``.

        That is the index of the largest output; an only output is taken as the logit of label 1.
        """
        self._check(params, features)
        flat, inputs = _tensor(params), self._inputs(features)
        labels = torch.empty(inputs.shape[:2], dtype=torch.int64, device=inputs.device)
        constants = self._constants_like(flat)
        with self._calling, torch.no_grad():
            for row, client in zip(labels, inputs, strict=True):
                outputs = self._call(flat, constants, client).reshape(len(client), -1)
                row[:] = outputs.argmax(1) if outputs.shape[1] > 1 else outputs[:, 0] > 0
        return _like(features, labels.reshape(features.shape[:-1]))

    def _evaluate(
        self, params: Array, features: Array, labels: Array, *, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        """Return losses ``(...)`` and gradients ``(..., num_params)``, empty unless asked for."""
        self._check(params, features)
        _check_labels(features, labels)
        flat, inputs = _tensor(params), self._inputs(features)
        targets = _tensor(labels).reshape(inputs.shape[:2])
        if not targets.is_floating_point():
            targets = targets.long()
        run = self._stacked if self._vectorizes and len(inputs) > 1 else self._each
        with self._calling:
            losses, gradients = run(flat, inputs, targets, differentiate)
        if self.l2:
            losses = losses + self.l2 / 2 * (flat @ flat)
            gradients = gradients + self.l2 * flat if differentiate else gradients
        leading = features.shape[:-2]
        return losses.reshape(leading), gradients.reshape(*leading, gradients.shape[-1])

    def _stacked(
        self, flat: Tensor, inputs: Tensor, labels: Tensor, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        """Differentiate many clients at once; if `vmap` cannot, go one by one from now on."""
        chunk = _STACK_BYTES // max(1, inputs[0].nbytes)
        if chunk < 2:
            return self._each(flat, inputs, labels, differentiate)
        constants = self._constants_like(flat)

        def loss(params: Tensor, client: Tensor, client_labels: Tensor) -> Tensor:
            return self._client_loss(params, constants, client, client_labels)

        function = grad_and_value(loss) if differentiate else loss
        mapped = vmap(function, in_dims=(None, 0, 0), chunk_size=chunk)
        try:
            with torch.no_grad():  # what is inside `grad_and_value` is recorded all the same
                results: Any = mapped(flat, inputs, labels)
        except Exception as error:
            # Whatever is not the fault of `vmap` is raised again here, without its clutter.
            by_loop = self._each(flat, inputs, labels, differentiate)
            self._vectorizes = False
            _logger.info("%s goes through clients one by one, because vmap failed: %s", self, error)
            return by_loop
        gradients, losses = results if differentiate else (flat.new_empty(len(inputs), 0), results)
        return losses, gradients

    def _each(
        self, flat: Tensor, inputs: Tensor, labels: Tensor, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        """Differentiate one client after the other."""
        constants = self._constants_like(flat)
        params = flat.detach().requires_grad_(differentiate)
        losses = flat.new_empty(len(inputs))
        gradients = flat.new_empty(len(inputs), self.num_params if differentiate else 0)
        for index, (client, client_labels) in enumerate(zip(inputs, labels, strict=True)):
            with torch.set_grad_enabled(differentiate), self._refusing_randomness(flat.device):
                loss = self._client_loss(params, constants, client, client_labels)
            losses[index] = loss.detach()
            if differentiate:
                (gradients[index],) = torch.autograd.grad(loss, params)
        return losses, gradients

    def _client_loss(
        self, flat: Tensor, constants: dict[str, Tensor], inputs: Tensor, labels: Tensor
    ) -> Tensor:
        loss = self._loss(self._call(flat, constants, inputs), labels)
        if loss.shape != ():
            raise ConfigError(
                f"the loss has shape {tuple(loss.shape)}; it must be one number, the mean over "
                f"the {len(labels)} samples"
            )
        return loss * len(labels) if self.scaling == "sum" else loss

    def _call(self, flat: Tensor, constants: dict[str, Tensor], inputs: Tensor) -> Any:
        """Return the module's outputs at ``flat``; it may write to copies of its buffers."""
        pieces = zip(self.layout, torch.split(flat, self._sizes), strict=True)
        tensors = {key: piece.reshape(shape) for (key, shape), piece in pieces}
        tensors |= {key: constant.clone() for key, constant in constants.items()}
        return functional_call(self._module, tensors, (inputs,))

    def _constants_like(self, flat: Tensor) -> dict[str, Tensor]:
        """Return buffers and frozen parameters in the precision and on the device of ``flat``."""
        kind = (flat.dtype, flat.device)
        if kind not in self._constants:
            frozen = {k: v for k, v in self._module.named_parameters() if not v.requires_grad}
            self._constants[kind] = {
                key: value.to(flat if value.is_floating_point() else flat.device)
                for key, value in (frozen | dict(self._module.named_buffers())).items()
            }
        return self._constants[kind]

    def _inputs(self, features: Array) -> Tensor:
        """Return what the module sees, ``(clients, n, *input_shape)``."""
        *leading, num_samples, num_features = features.shape
        shape = self.input_shape or (num_features,)
        return _tensor(features).reshape(math.prod(leading), num_samples, *shape)

    @contextmanager
    def _refusing_randomness(self, device: torch.device) -> Iterator[None]:
        """Raise if the first call advances torch's generators: its gradients would be noise."""
        if self._draws_nothing:
            yield
            return
        before = _random_state(device)
        yield
        if not torch.equal(before, _random_state(device)):
            raise ConfigError(
                f"{self.name} draws random numbers in its forward pass; gradients must be "
                "repeatable: call eval() on the module, or leave the randomness out"
            )
        self._draws_nothing = True

    def _check(self, params: Array, features: Array) -> None:
        if params.shape != (self.num_params,):
            raise ConfigError(
                f"parameters have shape {tuple(params.shape)}; {self.name} needs "
                f"({self.num_params},)"
            )
        num_features = math.prod(self.input_shape) if self.input_shape else None
        if features.ndim < 2 or num_features not in (None, features.shape[-1]):
            raise ConfigError(
                f"features have shape {tuple(features.shape)}; {self.name} needs "
                f"(..., samples, {num_features or 'features'})"
            )
        if params.dtype != features.dtype:
            raise ConfigError(
                f"parameters are {params.dtype} and features {features.dtype}; they must agree"
            )


def _check_labels(features: Array, labels: Array) -> None:
    if labels.shape != features.shape[:-1]:
        raise ConfigError(
            f"labels have shape {tuple(labels.shape)}; features of shape "
            f"{tuple(features.shape)} need {tuple(features.shape[:-1])}"
        )
    if features.shape[-2] == 0:
        raise DataError("a client has 0 samples; a mean loss needs at least 1")


def _tensor(array: Array) -> Tensor:
    """Return a tensor that shares its memory with ``array`` where torch allows it."""
    if isinstance(array, Tensor):
        return array.detach()
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _like(array: Array, result: Tensor) -> Array:
    """Return ``result`` as NumPy or torch, whichever ``array`` is."""
    return result if isinstance(array, Tensor) else result.numpy()[()]


def _random_state(device: torch.device) -> Tensor:
    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    return state


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def _private_copy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).cpu()
    except Exception as error:  # anything may hang on a module that knows no copying
        raise ConfigError(f"{type(module).__name__} cannot be copied: {error}") from error


def _reset_parameters(module: nn.Module, seed: int) -> None:
    """Draw all parameters again, as the layers do when made, without touching global state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # Inner layers first, so that what an outer one does to its parts remains.
        for layer in reversed(list(module.modules())):
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()


def _check_parameters(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is a {type(module).__name__}, not a torch.nn.Module")
    for name, value in module.named_parameters():
        if isinstance(value, nn.UninitializedParameter) or value.is_meta:
            raise ConfigError(f"parameter {name!r} has no values yet; call the module once before")
    trainable = _trainable(module)
    if not trainable:
        raise ConfigError(f"{type(module).__name__} has 0 parameters that require a gradient")
    for name, value in trainable.items():
        if not value.is_floating_point():
            raise ConfigError(f"parameter {name!r} is {value.dtype}; it must be floating point")


def _check_layers(module: nn.Module) -> None:
    """Refuse layers whose gradients are random or depend on what was computed before."""
    for path, layer in module.named_modules():
        if not layer.training:
            continue
        where = f"layer {path!r}, {layer}," if path else f"{layer}"
        rate = layer.p if isinstance(layer, _DROPOUTS) else getattr(layer, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ConfigError(
                f"{where} drops out at random; gradients must be repeatable: "
                "call eval() on it or set its rate to 0"
            )
        if getattr(layer, "track_running_stats", False):
            raise ConfigError(
                f"{where} updates running statistics, which no gradient carries: use GroupNorm, "
                "set track_running_stats=False, or call eval() on it to keep them fixed"
            )


def _check_reset(module: nn.Module) -> None:
    for path, layer in module.named_modules():
        owns = any(value.requires_grad for value in layer.parameters(recurse=False))
        if owns and not callable(getattr(layer, "reset_parameters", None)):
            raise ConfigError(
                f"reset needs reset_parameters() on every layer with parameters; "
                f"{path or 'the module itself'} ({type(layer).__name__}) has none"
            )
