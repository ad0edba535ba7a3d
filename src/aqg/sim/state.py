"""A simulation between two rounds: the same for every engine, so runs can change engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from aqg.core.types import Float64Array, FloatArray, IntArray


class SimulationState(NamedTuple):
    """Server and clients together; client and server mirrors are one array, being equal.

    Attributes:
        round: the next round, counted from 1.
        parameters: the model ``θ``, ``(n,)``.
        total: the server's running sum ``Σ_m ref_m``, ``(n,)``.
        history: ``‖direction‖²/M²`` of the last steps, newest first, times the `fresh_share` of
            the server optimizer.
        mirrors: ``ref_m``, ``(M, n)``, or ``(M, 0)`` where the recipe keeps none.
        directions: which way each coordinate went in the last upload, ``(M, n)`` or ``(M, 0)``;
            both ends of the wire remember it.
        residuals: error feedback, ``(M, n)`` or ``(M, 0)``.
        averages: of each client's gradients, ``(M, n)`` or ``(M, 0)``.
        notes: what each client's schedule remembers, ``(M, k)`` or ``(M, 0)``.
        stored_errors: ``‖ε̂_b‖²`` at each client's last upload, ``(M, b_max)``.
        silent_rounds: rounds since each client spoke, ``(M,)``.
        momentum: of the server optimizer, ``(n,)`` or ``(0,)``.
        variance: of the server optimizer, ``(n,)`` or ``(0,)``.
        statistics: of the model, as `RunStatistics.to_array` returns them; ``(0, 0)``: none.

    """

    round: int
    parameters: FloatArray
    total: Float64Array
    history: tuple[float, ...]
    mirrors: FloatArray
    directions: NDArray[np.int8]
    residuals: FloatArray
    averages: FloatArray
    notes: Float64Array
    stored_errors: Float64Array
    silent_rounds: IntArray
    momentum: Float64Array
    variance: Float64Array
    statistics: Float64Array = np.zeros((0, 0))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return named arrays that a file can hold."""
        return {name: np.asarray(value) for name, value in self._asdict().items()}

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> SimulationState:
        """Return the state that `to_arrays` wrote."""
        optional = SimulationState._field_defaults
        names = [name for name in SimulationState._fields if name not in optional]
        missing = [name for name in names if name not in arrays]
        if missing:
            raise RunError(f"checkpoint has no {missing[0]!r}; it is not one of a simulation")
        return SimulationState(
            round=int(arrays["round"]),
            parameters=arrays["parameters"],
            total=arrays["total"],
            history=tuple(arrays["history"].tolist()),
            mirrors=arrays["mirrors"],
            directions=arrays["directions"],
            residuals=arrays["residuals"],
            averages=arrays["averages"],
            notes=arrays["notes"],
            stored_errors=arrays["stored_errors"],
            silent_rounds=arrays["silent_rounds"],
            momentum=arrays["momentum"],
            variance=arrays["variance"],
            statistics=arrays.get("statistics", np.zeros((0, 0))),
        )
