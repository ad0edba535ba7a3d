"""Which recipes can take the place of federated averaging: same accuracy, fewer bytes."""
