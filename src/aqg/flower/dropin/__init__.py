"""Two lines on any Flower app: a mod for its ClientApp, and a wrapper for its strategy."""
