"""Low-rank adapters for a frozen network, learned by several clients that keep their images."""
