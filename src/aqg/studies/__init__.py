"""Studies: what to run next and why, and tables and pictures made from run directories."""
