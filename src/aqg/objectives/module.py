"""Any `torch.nn.Module` as an objective.

The module is called as a pure function of a flat ``θ``: its parameters are views of ``θ``, and its
buffers are copies, so a gradient on all samples depends on ``θ`` and the samples alone. Stacked
clients are differentiated at once by `torch.func.vmap`, or one by one by plain autograd where that
cannot run the module. Where clients train on minibatches, a `Session` lets the module draw random
numbers and change its buffers.

One by one, a client's numbers are those of the client alone to the last bit. `vmap` adds up in
another order, so the simulator on the CPU, which promises bits, does not stack modules.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.overrides import TorchFunctionMode

from aqg.core.types import Float64Array
from aqg.errors import ConfigError, DataError, require
from aqg.objectives.base import Array, Objective, Scaling, check_loss_settings
from aqg.objectives.layout import Buffers, ModelLayout
from aqg.objectives.metrics import main_output
from aqg.spec import seeded

_STACK_BYTES = 1 << 24
"""The most features that are differentiated at once; activations take a multiple of it."""
_MEASURED_AT_ONCE = 1024
"""The most samples of which outputs are computed at once."""

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)

_logger = logging.getLogger(__name__)

State = dict[str, Tensor]
"""Buffers and frozen parameters by name."""
Loss = Callable[[Any, Tensor], Tensor]
"""The mean loss of a batch, from outputs and targets."""


class ModuleObjective(Objective):
    """``f_m(θ) = w loss(module_θ(x), y) + l2/2 ‖θ‖²``, where ``loss`` is a mean over ``n`` samples.

    The weight ``w`` is 1 if ``scaling`` is ``"mean"`` and ``n`` if it is ``"sum"``.
    `Objective.from_module` explains the arguments.
    """

    stackable = False
    takes_integers = True

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None = None,
        *,
        input_shape: tuple[int, ...] | None = None,
        l2: float = 0.0,
        scaling: Scaling = "mean",
        name: str = "module",
        reset: bool = False,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        statistics: str = "average",
    ) -> None:
        check_loss_settings(l2, scaling)
        if input_shape is not None and (not input_shape or min(input_shape) < 1):
            raise ConfigError(f"input_shape {input_shape!r} is not a tuple of integers above 0")
        layout = ModelLayout.of(module, include=include, exclude=exclude, statistics=statistics)
        if reset:
            check_reset(module)
        try:
            private = copy.deepcopy(module).cpu()
        except Exception as error:  # anything may hang on a module that knows no copying
            raise ConfigError(f"{type(module).__name__} cannot be copied: {error}") from error
        for layer in private.modules() if statistics == "frozen" else ():
            if getattr(layer, "track_running_stats", False):
                layer.eval()  # it uses the statistics it has, and leaves them alone
        super().__init__(name, layout.shapes, l2, convex=False)
        self.model_layout = layout
        self.input_shape = input_shape
        self.scaling = scaling
        self.carrier: Carrier | None = None
        self.module = private  # as it came: names, frozen parameters, buffers; not to be changed
        self._evaluated = _for_evaluation(private)
        self._loss_function = nn.functional.cross_entropy if loss is None else loss
        self._shapes_were_checked = False
        self._constants: dict[tuple[torch.dtype, torch.device], State] = {}
        self._reset = reset
        self._vectorizes = True
        self._draws_nothing = False
        self._is_repeatable = False

    def init_params(self, seed: int) -> Float64Array:
        require(seed >= 0, "seed", seed, "at least 0")
        module = self.module
        if self._reset:
            module = copy.deepcopy(module)
            with seeded(seed):
                # Inner layers first, so that what an outer one does to its parts remains.
                for layer in reversed(list(module.modules())):
                    if callable(draw := getattr(layer, "reset_parameters", None)):
                        draw()
        return self.model_layout.flatten(module).astype(np.float64)

    def initial_buffers(self) -> Buffers:
        return self.model_layout.read_buffers(self.module)

    def with_module(self, module: nn.Module) -> ModuleObjective:
        self.model_layout.check(module)
        evaluated = _for_evaluation(module)
        return self._with(module=module, _evaluated=evaluated, _constants={}, _reset=False)

    def for_samples(self, shape: tuple[int, ...]) -> ModuleObjective:
        if len(shape) == 1 or self.input_shape is not None:
            return self
        return self._with(input_shape=shape)

    def carrying(self, carrier: Carrier | None) -> ModuleObjective:
        return self._with(carrier=carrier)

    def _with(self, **attributes: Any) -> ModuleObjective:
        bound = copy.copy(self)
        vars(bound).update(attributes)
        return bound

    def require_repeatable(self) -> None:
        """Refuse layers whose gradients are random or depend on what was computed before.

        Where clients send exact gradients, on all their samples, such a layer would fill their
        memory with noise. Where they train on minibatches, noise is the normal case.
        """
        training = ((path, layer) for path, layer in self.module.named_modules() if layer.training)
        for path, layer in () if self._is_repeatable else training:
            what = type(layer).__name__ if "\n" in repr(layer) else repr(layer)
            where = f"layer {path!r}, {what}," if path else what
            rate = layer.p if isinstance(layer, _DROPOUTS) else getattr(layer, "dropout", 0.0)
            if isinstance(rate, float) and rate > 0:
                raise ConfigError(
                    f"{where} drops out at random; gradients on all samples must be repeatable: "
                    "train on minibatches (batch_size), call eval() on it, or set its rate to 0"
                )
            if getattr(layer, "track_running_stats", False):
                raise ConfigError(
                    f"{where} updates running statistics, which no gradient on all samples "
                    "carries: train on minibatches (batch_size), use GroupNorm, set "
                    "track_running_stats=False, or call eval() on it to keep them fixed"
                )
        self._is_repeatable = True

    def losses(self, params: Array, features: Array, labels: Array) -> Array:
        return self._run(params, features, labels, differentiate=False)[0]

    def losses_and_gradients(
        self, params: Array, features: Array, labels: Array
    ) -> tuple[Array, Array]:
        self.require_repeatable()
        return self._run(params, features, labels, differentiate=True)

    def _run(
        self, params: Array, features: Array, labels: Array, *, differentiate: bool
    ) -> tuple[Array, Array]:
        flat, inputs, targets, leading = self._tensors(params, features, labels)
        run = self._stacked if self._vectorizes and len(inputs) > 1 else self._each
        with LOCK:
            losses, gradients = run(flat, inputs, targets, differentiate)
        losses, gradients = self._regularized(flat, losses, gradients)
        shaped = gradients.reshape(*leading, gradients.shape[-1])
        return _like(features, losses.reshape(leading)), _like(features, shaped)

    def _regularized(self, flat: Tensor, losses: Tensor, gradients: Tensor) -> Any:
        if not self.l2:
            return losses, gradients
        slopes = self.l2 * flat[: gradients.shape[-1]]  # none where only losses are wanted
        return losses + self.l2 / 2 * (flat @ flat), gradients + slopes

    @contextmanager
    def session(self, key: Sequence[int]) -> Iterator[Session]:
        client = int(key[1])
        session = Session(self, key, None if self.carrier is None else self.carrier.start(client))
        yield session
        if self.carrier is not None and session.state is not None:
            self.carrier.finish(client, self.model_layout.buffers_of(session.state))

    def predict(self, params: Array, features: Array) -> Array:
        """Return the largest output of each sample; an only output is the logit of label 1."""
        flat, inputs, leading = self._inputs(params, features)
        labels = torch.empty(inputs.shape[:2], dtype=torch.int64, device=inputs.device)
        for row, client in zip(labels, inputs, strict=True):
            found = [main_output(part) for part in self._outputs(flat, client)]
            outputs = np.concatenate(found).reshape(len(client), -1)
            best = outputs.argmax(1) if outputs.shape[1] > 1 else outputs[:, 0] > 0
            row[:] = torch.from_numpy(best)
        return _like(features, labels.reshape(*leading, inputs.shape[1]))

    def test_batches(
        self, params: Array, features: Array, labels: Array
    ) -> Iterator[tuple[Any, Any]]:
        flat, inputs, targets, _ = self._tensors(params, features, labels)
        pieces = torch.split(targets[0], _MEASURED_AT_ONCE)
        yield from zip(self._outputs(flat, inputs[0]), pieces, strict=True)

    def views(self) -> Sequence[AbstractContextManager[None]]:
        return [nullcontext()] if self.carrier is None else self.carrier.views()

    def _outputs(self, flat: Tensor, inputs: Tensor) -> Iterator[Any]:
        for part in torch.split(inputs, _MEASURED_AT_ONCE):
            with LOCK, torch.no_grad():
                yield self._call(flat, self._measured_state(flat), part, training=False)

    def _stacked(
        self, flat: Tensor, inputs: Tensor, labels: Tensor, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        """Differentiate many clients at once; if `vmap` cannot, go one by one from now on."""
        chunk = _STACK_BYTES // max(1, inputs[0].nbytes)
        if chunk < 2:
            return self._each(flat, inputs, labels, differentiate)
        state = self._state(flat) if differentiate else self._measured_state(flat)

        def loss(params: Tensor, client: Tensor, client_labels: Tensor) -> Tensor:
            mine = {name: value.clone() for name, value in state.items()}
            return self._client_loss(params, mine, client, client_labels, training=differentiate)

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
        params = flat.detach().requires_grad_(differentiate)
        losses = flat.new_empty(len(inputs))
        gradients = flat.new_empty(len(inputs), self.num_params if differentiate else 0)
        for index, (client, client_labels) in enumerate(zip(inputs, labels, strict=True)):
            if not differentiate:
                losses[index] = self._measured_loss(flat, client, client_labels)
                continue
            with torch.enable_grad(), self._refusing_randomness(flat.device):
                state = self._state(flat)
                loss = self._client_loss(params, state, client, client_labels, training=True)
            losses[index] = loss.detach()
            (gradients[index],) = torch.autograd.grad(loss, params)
        return losses, gradients

    def _measured_loss(self, flat: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return a client's loss, the mean over parts of it where it has many samples."""
        total = flat.new_zeros(())
        parts = torch.split(labels, _MEASURED_AT_ONCE)
        for outputs, part in zip(self._outputs(flat, inputs), parts, strict=True):
            total = total + self._loss(outputs, part) * (len(part) / len(labels))
        return total * len(labels) if self.scaling == "sum" else total

    def _client_loss(
        self, flat: Tensor, state: State, inputs: Tensor, labels: Tensor, *, training: bool
    ) -> Tensor:
        loss = self._loss(self._call(flat, state, inputs, training=training), labels)
        return loss * len(labels) if self.scaling == "sum" else loss

    def _measured_state(self, flat: Tensor) -> State:
        return self._state(flat, None if self.carrier is None else self.carrier.evaluation())

    def _state(self, flat: Tensor, buffers: Buffers | None = None) -> State:
        """Return buffers, fresh copies that a call may change, and frozen parameters.

        They have the precision and the device of ``flat``. ``buffers`` replaces the module's own.
        """
        kind = (flat.dtype, flat.device)
        layout, names = self.model_layout, dict(self.module.named_buffers())
        if kind not in self._constants:
            trained = {spec.name for spec in layout.parameters}
            fixed = {k: v for k, v in self.module.named_parameters() if k not in trained}
            self._constants[kind] = {
                name: value.detach().to(flat if value.is_floating_point() else flat.device)
                for name, value in (fixed | names).items()
            }
        constants = self._constants[kind].items()
        state = {k: value.clone() if k in names else value for k, value in constants}
        if buffers is not None:
            for specs, values in zip((layout.statistics, layout.counters), buffers, strict=True):
                for spec in specs:
                    part = torch.from_numpy(values[spec.place].reshape(spec.shape).copy())
                    state[spec.name] = part.to(state[spec.name])
        return state

    def _call(self, flat: Tensor, state: State, inputs: Tensor, *, training: bool) -> Any:
        """Return the module's outputs at ``flat``; buffers in ``state`` become what it leaves."""
        specs = self.model_layout.parameters
        pieces = zip(specs, torch.split(flat, [spec.size for spec in specs]), strict=True)
        tensors = {spec.name: piece.reshape(spec.shape) for spec, piece in pieces}
        everything = {**tensors, **state}
        module = self.module if training else self._evaluated
        outputs = functional_call(module, everything, (inputs,))
        state.update((name, everything[name].detach()) for name in state)
        return outputs

    def _loss(self, outputs: Any, targets: Tensor) -> Tensor:
        is_checked = self._shapes_were_checked or len(targets) < 2
        with nullcontext() if is_checked else _Watch(outputs, targets, self.name):
            loss = self._loss_function(outputs, targets)
        self._shapes_were_checked = self._shapes_were_checked or not is_checked
        if loss.shape != ():
            raise ConfigError(
                f"the loss has shape {tuple(loss.shape)}; it must be one number, the mean over "
                f"the {len(targets)} samples"
            )
        return loss

    def _inputs(self, params: Array, features: Array) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Return ``θ``, what the module sees, ``(clients, n, ...)``, and the leading axes."""
        if params.shape != (self.num_params,):
            raise ConfigError(
                f"parameters have shape {tuple(params.shape)}; {self.name} needs "
                f"({self.num_params},)"
            )
        shape = self.input_shape
        num_axes = 1
        if shape is not None and tuple(features.shape[-len(shape) :]) == shape:
            num_axes = len(shape)
        num_features = math.prod(features.shape[-num_axes:])
        if features.ndim < 1 + num_axes or (shape and math.prod(shape) != num_features):
            wanted = math.prod(shape) if shape else "features"
            raise ConfigError(
                f"features have shape {tuple(features.shape)}; {self.name} needs "
                f"(..., samples, {wanted})"
            )
        flat, tensor = _tensor(params), _tensor(features)
        if not tensor.is_floating_point():
            tensor = tensor.long()
        elif tensor.dtype != flat.dtype:
            raise ConfigError(
                f"parameters are {params.dtype} and features {features.dtype}; they must agree"
            )
        *leading, num_samples = tensor.shape[:-num_axes]
        sample = shape or (num_features,)
        inputs = tensor.reshape(math.prod(leading), num_samples, *sample)
        return flat, inputs, tuple(leading)

    def _tensors(
        self, params: Array, features: Array, labels: Array
    ) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        """Return ``θ``, inputs and targets ``(clients, n, ...)``, and the leading axes."""
        flat, inputs, leading = self._inputs(params, features)
        wanted = (*leading, inputs.shape[1])
        if tuple(labels.shape[: len(wanted)]) != wanted:
            raise ConfigError(
                f"labels have shape {tuple(labels.shape)}; features of shape "
                f"{tuple(features.shape)} need {wanted}, and any axes after them"
            )
        if inputs.shape[1] == 0:
            raise DataError("a client has 0 samples; a mean loss needs at least 1")
        targets = _tensor(labels)
        targets = targets.to(flat.dtype) if targets.is_floating_point() else targets.long()
        targets = targets.reshape(*inputs.shape[:2], *labels.shape[len(wanted) :])
        return flat, inputs, targets, leading

    @contextmanager
    def _refusing_randomness(self, device: torch.device) -> Iterator[None]:
        """Raise if the first call advances torch's generators: its gradients would be noise."""
        if self._draws_nothing:
            yield
            return
        before = _generators(device)
        yield
        if not all(map(torch.equal, before, _generators(device))):
            raise ConfigError(
                f"{self.name} draws random numbers in its forward pass; gradients on all samples "
                "must be repeatable: train on minibatches, call eval() on the module, or leave "
                "the randomness out"
            )
        self._draws_nothing = True


def _for_evaluation(module: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode that shares all tensors."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared).eval()


def _tensor(array: Array) -> Tensor:
    if isinstance(array, Tensor):
        return array.detach()
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _like(array: Array, result: Tensor) -> Array:
    return result if isinstance(array, Tensor) else result.numpy()[()]


_STREAM = 0xD20F
"""Keeps torch's random numbers apart from others of the same seed."""


class Carrier(Protocol):
    """Keeps a model's buffers between rounds.

    It says with which a client's training starts, takes those after it, says with which a model is
    measured, and gives contexts for the models to be measured: one, or one per client.
    """

    def start(self, client: int) -> Buffers: ...

    def finish(self, client: int, buffers: Buffers) -> None: ...

    def evaluation(self) -> Buffers: ...

    def views(self) -> Sequence[AbstractContextManager[None]]: ...


class Session:
    """Gradients on minibatches of one client, one after the other; ``key`` as in `session`.

    Buffers start from ``start`` (None: the module's own); `state` are they as the last step left
    them, and frozen parameters.
    """

    def __init__(self, objective: ModuleObjective, key: Sequence[int], start: Buffers | None):
        self._objective = objective
        self._start = start
        seed, client, round_number = key
        sequence = np.random.SeedSequence([seed, _STREAM, client, round_number])
        self._seed = int(sequence.generate_state(1, np.uint64)[0])
        self._random: tuple[Tensor, ...] = ()
        self.state: State | None = None

    def losses_and_gradients(
        self, params: Array, features: Array, labels: Array
    ) -> tuple[Array, Array]:
        objective = self._objective
        flat, inputs, targets, _ = objective._tensors(params, features, labels)
        if len(inputs) != 1:
            raise ConfigError(f"a session is of one client, not {len(inputs)}")
        with LOCK:
            if self.state is None:
                self.state = objective._state(flat, self._start)
            with self._drawing(flat.device):
                leaf = flat.detach().requires_grad_()
                samples = inputs[0], targets[0]
                loss = objective._client_loss(leaf, self.state, *samples, training=True)
                (gradient,) = torch.autograd.grad(loss, leaf)
        loss, gradient = objective._regularized(flat, loss.detach(), gradient)
        return _like(features, loss), _like(features, gradient)

    @contextmanager
    def _drawing(self, device: torch.device) -> Iterator[None]:
        """Let torch's generators go on where this session left them, and put them back after."""
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if self._random:
                torch.set_rng_state(self._random[0])
                for state in self._random[1:]:
                    torch.cuda.set_rng_state(state, device)
            else:
                torch.default_generator.manual_seed(self._seed)
                if device.type == "cuda":
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(self._seed)
            yield
            self._random = _generators(device)


def _generators(device: torch.device) -> tuple[Tensor, ...]:
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),)


LOCK = threading.RLock()
"""`functional_call` swaps the tensors of a module: a thread at a time."""


_ELEMENTWISE = {"sub", "rsub", "add", "radd", "mul", "rmul", "div", "true_divide", "truediv"}
_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss", "kl_div"}


class _Watch(TorchFunctionMode):
    """Raises `ConfigError` where a loss compares shapes that would broadcast."""

    def __init__(self, outputs: Any, targets: Tensor, name: str) -> None:
        super().__init__()
        self._ends = (outputs, targets)
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(given) > 1:
            self._check(getattr(func, "__name__", "").strip("_"), *given[:2])
        return func(*args, **kwargs)

    def _check(self, operation: str, first: Tensor, second: Tensor) -> None:
        shapes = tuple(first.shape), tuple(second.shape)
        if shapes[0] == shapes[1] or operation not in _ELEMENTWISE | _LOSSES:
            return
        try:
            joint = np.broadcast_shapes(*shapes)
        except ValueError:
            return  # torch says so itself
        both_grow = joint not in shapes and len(shapes[0]) != len(shapes[1])
        are_ends = all(any(tensor is end for end in self._ends) for tensor in (first, second))
        if operation in _LOSSES or both_grow or (are_ends and min(map(len, shapes)) > 0):
            raise ConfigError(
                f"the loss of {self._name} compares shapes {shapes[0]} and {shapes[1]}, which "
                f"broadcast to {joint}; give the targets the shape of the outputs, or squeeze "
                "the outputs"
            )


def check_reset(module: nn.Module) -> None:
    """Refuse layers that cannot draw their parameters again."""
    for path, layer in module.named_modules():
        owns = any(value.requires_grad for value in layer.parameters(recurse=False))
        if owns and not callable(getattr(layer, "reset_parameters", None)):
            raise ConfigError(
                f"reset needs reset_parameters() on every layer with parameters; "
                f"{path or 'the module itself'} ({type(layer).__name__}) has none"
            )
