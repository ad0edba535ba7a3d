"""The algorithm: grids, statistics, rules, and the two state machines."""
