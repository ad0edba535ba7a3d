"""A model of any size whose clients upload noise."""
