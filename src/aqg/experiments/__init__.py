"""From a config to a run directory."""
