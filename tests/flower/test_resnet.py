"""A ResNet with batch normalization comes as far with few bytes as with all."""

import pytest

from tests.flower import resnet

TWO_POINTS = 0.02


def simulated(recipe):
    """Return the accuracy of the net in the simulator, on minibatches."""
    simulation = resnet.make_simulation(recipe, resnet.make_net())
    records = [simulation.run_round(evaluate=False) for _ in range(resnet.SIMULATED_ROUNDS)]
    assert not any(record.faults for record in records)
    buffers = simulation.statistics.buffers()
    for spec in simulation.problem.objective.model_layout.statistics:
        if spec.name.endswith("running_var"):
            assert (buffers.values[spec.place] > 0).all(), spec.name
    return resnet.simulated_accuracy(simulation)


@pytest.mark.soak
def test_in_the_simulator():
    accuracies = {recipe: simulated(recipe) for recipe in ("gd", "auto", "lean", "eden", "qsgd")}
    assert accuracies["gd"] > 0.9
    assert min(accuracies.values()) >= accuracies["gd"] - TWO_POINTS, accuracies
