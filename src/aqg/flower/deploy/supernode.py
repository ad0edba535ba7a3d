"""``flower-supernode``, repaired: ``python -m aqg.flower.deploy.supernode`` takes its arguments.

What is repaired, and in which versions of Flower, is in `aqg.flower.private`.
"""

from __future__ import annotations

from aqg.flower.deploy.commands import find_command
from aqg.flower.private import repair_node


def main() -> None:
    """Run ``flower-supernode``, repaired."""
    repair_node()
    find_command("flower-supernode")()


if __name__ == "__main__":
    main()
