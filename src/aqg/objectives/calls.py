"""A torch module as a pure function of a flat ``θ``, its buffers and a batch.

`functional_call` runs the module with tensors that replace its own, so that the module itself never
changes. There are two modules: the user's, in the mode it came in, for gradients; and one in
evaluation mode, which shares its tensors, for losses and predictions.
"""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from aqg.errors import ConfigError
from aqg.objectives.broadcast import watched_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqg.objectives.layout import Buffers, ModelLayout

LOCK = threading.RLock()
"""`functional_call` swaps the tensors of a module: a thread at a time."""


class ModuleCalls:
    """Outputs and losses of a module at any ``θ``.

    Args:
        module: a private copy of the user's.
        layout: which of its tensors make up ``θ``.
        loss: the mean loss of a batch, from outputs and targets.
        name: for messages.

    """

    def __init__(
        self,
        module: nn.Module,
        layout: ModelLayout,
        loss: Callable[[Any, Tensor], Tensor],
        name: str,
    ) -> None:
        self.module = module
        self.layout = layout
        self.name = name
        shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
        self.evaluated = copy.deepcopy(module, shared).eval()
        self._loss = loss
        self._shapes_were_checked = False
        self._sizes = [spec.size for spec in layout.parameters]
        self._cache: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}

    def with_module(self, module: nn.Module) -> ModuleCalls:
        """Return the same with another module of the same layout."""
        return ModuleCalls(module, self.layout, self._loss, self.name)

    def state(self, flat: Tensor, buffers: Buffers | None = None) -> dict[str, Tensor]:
        """Return buffers, fresh copies that a call may change, and frozen parameters.

        They have the precision and the device of ``flat``. ``buffers`` replaces the module's own.
        """
        constants = self._constants(flat)
        names = dict(self.module.named_buffers())
        state = {
            name: value.clone() if name in names else value for name, value in constants.items()
        }
        if buffers is not None:
            groups = (self.layout.statistics, self.layout.counters)
            for specs, values in zip(groups, buffers, strict=True):
                for spec in specs:
                    part = torch.from_numpy(values[spec.place].reshape(spec.shape).copy())
                    state[spec.name] = part.to(state[spec.name])
        return state

    def outputs(
        self, flat: Tensor, state: dict[str, Tensor], inputs: Tensor, *, training: bool
    ) -> Any:
        """Return the module's outputs at ``flat``; what it writes to buffers is in ``state``."""
        pieces = zip(self.layout.parameters, torch.split(flat, self._sizes), strict=True)
        tensors = {spec.name: piece.reshape(spec.shape) for spec, piece in pieces}
        everything = {**tensors, **state}
        module = self.module if training else self.evaluated
        outputs = functional_call(module, everything, (inputs,))
        state.update((name, everything[name].detach()) for name in state)
        return outputs

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss over a batch."""
        if self._shapes_were_checked or len(targets) < 2:
            loss = self._loss(outputs, targets)
        else:
            loss = watched_loss(self._loss, outputs, targets, self.name)
            self._shapes_were_checked = True
        if loss.shape != ():
            raise ConfigError(
                f"the loss has shape {tuple(loss.shape)}; it must be one number, the mean over "
                f"the {len(targets)} samples"
            )
        return loss

    def _constants(self, flat: Tensor) -> dict[str, Tensor]:
        kind = (flat.dtype, flat.device)
        if kind not in self._cache:
            trained = {spec.name for spec in self.layout.parameters}
            fixed = {k: v for k, v in self.module.named_parameters() if k not in trained}
            self._cache[kind] = {
                name: value.detach().to(flat if value.is_floating_point() else flat.device)
                for name, value in (fixed | dict(self.module.named_buffers())).items()
            }
        return self._cache[kind]
