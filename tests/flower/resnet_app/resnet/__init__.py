"""A residual network with batch normalization on Flower."""
