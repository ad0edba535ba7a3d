"""Which recipe can take the place of federated averaging: same accuracy, same rounds, fewer bytes."""
