"""The paper's experiments, run again: Table 1, its figures, and what differs, explained."""
