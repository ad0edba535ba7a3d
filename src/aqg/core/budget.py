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
"""

from __future__ import annotations

from typing import NamedTuple

from aqg.core.grids import round_up_to_bfloat16


class Budget(NamedTuple):
    """What uploads may add.

    Attributes:
        noise: ``b`` of the next round, a bfloat16 number.

    """

    noise: float = 0.0

    def after(self, nu: float, of_sum: float, of_parts: float, most: float) -> Budget:
        """Return the budget after a round.

        Args:
            nu: ``ν``.
            of_sum: ``‖T‖²``.
            of_parts: ``W``.
            most: how many uploads there were, or were expected.

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
        return Budget(round_up_to_bfloat16(nu * agreement))


def first_budget(nu: float) -> Budget:
    """Return the budget of the first round: as if updates had nothing in common."""
    return Budget(round_up_to_bfloat16(nu))
