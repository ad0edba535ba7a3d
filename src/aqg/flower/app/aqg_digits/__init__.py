"""The digits app: what is learned, and the two apps that learn it."""
