"""What makes the exchange of models and updates safe on any transport."""
