"""One run from a config; many runs from a plan that is asked what comes next; run directories."""
