"""How much noise clients may add to their uploads, as the server finds it from the uploads.

Clients that round at random (`aqg.core.auto`) add noise of ``b`` times their update's energy each.
It is independent, and the updates are not: where they agree their sum grows faster than the noise
in it, and every client may say less. From the sum ``T = Σ_m w_m Q_m`` of a round and the energies
``W = Σ_m ‖w_m Q_m‖²`` of its parts,

    ``‖Σ_m w_m g_m‖² ≈ ‖T‖² - W·b/(1 + b)``  and  ``Σ_m ‖w_m g_m‖² ≈ W/(1 + b)``,

because noise adds ``b·‖g_m‖²`` to the energy of an upload and, being independent, as much to that
of the sum. The noise of the sum is ``ν`` times its own energy if in the next round

    ``b = ν·‖Σ_m w_m g_m‖² / Σ_m ‖w_m g_m‖²``,

which is ``ν`` for updates that have nothing in common, ``ν·m`` for ``m`` equal ones, and less than
``ν`` for those that cancel each other.

Clients that keep what they do not send are told a noise of 0, and send no noise, as long as the
model gets anywhere. What they send at different times does not cancel out, so that updates which do
cancel, as those of clients with one label each that train hard, move the model at random. After
steps ``s_k`` that have nothing in common its squared distance from the start is ``Σ_k ‖s_k‖²``.
While it is less than half of that, they are told ``b``, round at random, and keep nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from aqg.core.grids import round_up_to_bfloat16

LOST = 0.5
"""A squared distance from the start below which a model gets nowhere, in that of a random walk."""
_BELOW = 1 - 2.0**-40
"""So that what is 1 but for its last bits, as with a single upload, is rounded to 1."""
_LEAST = 2.0**-20
"""A noise that is as good as none, where uploads are rounded at random all the same."""


class Budget(NamedTuple):
    """What uploads may add."""

    noise: float = 0.0  # ``b`` of the next round, a bfloat16 number
    walk: float = 0.0  # ``Σ_k ‖s_k‖²``, where clients keep what they do not send

    def after(self, nu: float, of_sum: float, of_parts: float, most: float) -> Budget:
        """Return the budget after a round, from ``ν``, ``‖T‖²`` and ``W``.

        ``most`` is how many uploads there were, or were expected.

        >>> Budget(1.0).after(1.0, of_sum=2.0, of_parts=2.0, most=10).noise  # nothing in common
        1.0
        >>> Budget(1.0).after(1.0, of_sum=11.0, of_parts=2.0, most=10).noise  # ten that are equal
        10.0
        """
        if not 0 < of_parts < float("inf") or not of_sum < float("inf"):
            return self
        b = self.noise
        signal, energy = of_sum - of_parts * b / (1.0 + b), of_parts / (1.0 + b)
        if not energy:  # too small a number
            return self
        agreement = min(max(signal / energy, 0.0), max(1.0, most))
        return self._replace(noise=round_up_to_bfloat16(nu * agreement * _BELOW))

    def while_steady(self, moved: float, distance: float) -> Budget:
        """Return the budget of clients that keep what they do not send, after a step.

        ``moved`` is ``‖s_k‖²``, ``distance`` that of the model from where it started, squared.

        >>> Budget(0.5, walk=4.0).while_steady(4.0, distance=8.0).noise  # as far as at random
        0.0
        >>> Budget(0.5, walk=4.0).while_steady(4.0, distance=2.0).noise
        0.5
        """
        walk = self.walk + moved
        noise = max(self.noise, _LEAST) if distance < LOST * walk else 0.0
        return Budget(noise, walk)


def first_budget(nu: float) -> Budget:
    """Return the budget of the first round: as if updates had nothing in common."""
    return Budget(round_up_to_bfloat16(nu))
