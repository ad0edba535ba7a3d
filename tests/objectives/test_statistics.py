"""Statistics beside the model: averaged with the clients' weights; only what changes travels."""

import numpy as np
import pytest

from aqg.errors import WireError

torch = pytest.importorskip("torch")
nn = torch.nn

from aqg.core.step_sizes import Fixed  # noqa: E402
from aqg.objectives.layout import Buffers, ModelLayout  # noqa: E402  (needs torch)
from aqg.objectives.statistics import SharedStatistics, describe_change, receive, sections  # noqa: E402
from aqg.wire.statistics import StatisticsMessage, encode_statistics  # noqa: E402


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((4,), -torch.inf))
        self.register_buffer("scale", torch.ones(3))
        self.norm = nn.BatchNorm1d(3)


def shared():
    module = Masked()
    layout = ModelLayout.of(module)
    return SharedStatistics.first(layout, layout.read_buffers(module))


def changed(start, **values):
    """Return buffers with whole tensors set; in `Masked` they lie as listed here."""
    places = {"mask": slice(0, 4), "scale": slice(4, 7), "mean": slice(7, 10), "var": slice(10, 13)}
    new = start.values.copy()
    for name, value in values.items():
        if name != "batches":
            new[places[name]] = value
    return Buffers(new, start.counts + int(values.get("batches", 0)))


def upload(server, **values):
    return describe_change(
        server.layout, server.received[0], changed(server.received[0], **values), server.travels
    )


def trained(server, values, share=1.0):
    """Return the statistics after clients moved mean and variance so far towards these."""
    messages = []
    for target in values:
        after = server.received[0].values.copy()
        after[7:] += share * (target - after[7:])
        end = Buffers(after, server.received[0].counts + 1)
        frame = describe_change(server.layout, server.received[0], end, server.travels)
        messages.append((1.0, server.read(frame)))
    return server.step(messages)


def test_the_average_has_the_weights_of_the_clients():
    server = shared()
    frames = [
        (3.0, upload(server, mean=1.0, batches=4)),
        (1.0, upload(server, mean=4.0, batches=9)),
    ]
    after = server.step([(weight, server.read(frame)) for weight, frame in frames])
    np.testing.assert_array_equal(after.buffers.values[7:10], 1.75)
    assert after.buffers.counts.tolist() == [9]
    messages = [(1.0, server.read(upload(server, var=3.0))), (1.0, server.read(b""))]
    # A client that sends nothing is as it was.
    np.testing.assert_array_equal(server.step(messages).buffers.values[10:13], 2.0)
    assert server.step([]) is server
    assert upload(server) == b""


def test_the_mean_of_statistics_has_the_weights_of_the_mean_of_models():
    start = shared()
    server = start._replace(average=8.0)
    plain, rule = start, Fixed(average=8.0)
    models = rule.init(start.buffers.values[4:])
    for value in (3.0, -1.0, 2.0, 7.0):
        frame = upload(server, mean=value, scale=value**2, batches=2)
        server = server.step([(1.0, server.read(frame))])
        frame = upload(plain, mean=value, scale=value**2, batches=2)
        plain = plain.step([(1.0, plain.read(frame))])
        models = rule.follow(models, server.buffers.values[4:])
        np.testing.assert_allclose(server.averaged.values[4:], models.mean, rtol=1e-14)
        np.testing.assert_array_equal(server.buffers.values, plain.buffers.values)
        assert plain.averaged is plain.buffers
    assert np.isneginf(server.averaged.values[:4]).all()  # constants stay what they are
    assert server.averaged.counts.tolist() == [8]
    assert 1.5 < server.averaged.values[7] < 7.0


def test_nothing_is_sent_where_there_is_nothing():
    layout = ModelLayout.of(nn.Linear(2, 2))
    plain = SharedStatistics.first(layout, layout.read_buffers(nn.Linear(2, 2)))
    assert plain.broadcast() == b""


def test_statistics_follow_the_clients_and_no_variance_turns_negative():
    random = np.random.default_rng(0)
    server, lowest = shared(), []
    for _ in range(60):
        server = trained(server, random.lognormal(0, 6, (5, 6)))
        lowest += [server.buffers.values[10:].min(), server.received[0].values[10:].min()]
    assert min(lowest) >= 0
    values, found = random.lognormal(0, 0.5, (5, 6)), []
    for _ in range(220):
        server = trained(server, values)
        found.append(server.buffers.values[7:])
    np.testing.assert_allclose(np.mean(found[20:], axis=0), values.mean(0), rtol=0.05)


def test_what_rounding_leaves_out_is_made_up_for():
    random = np.random.default_rng(1)
    server, values = shared(), random.lognormal(0, 1, (4, 6))
    found = []
    for _ in range(300):
        server = trained(server, values, share=0.05)  # less than half of a byte's steps
        found.append(server.buffers.values[7:])
    np.testing.assert_allclose(np.mean(found[100:], axis=0), values.mean(0), rtol=0.04)
    assert (np.abs(server.received[0].values[7:] / server.buffers.values[7:] - 1) < 1 / 8).all()


def test_what_no_client_changes_stays_as_it_came():
    module = Masked()
    nn.init.uniform_(module.norm.running_var, 1.0, 2.0)
    layout = ModelLayout.of(module)
    server = SharedStatistics.first(layout, layout.read_buffers(module))
    for _ in range(3):
        server = server.step([(1.0, server.read(upload(server, mean=np.pi)))])
    start = server.received[0].values[10:]
    np.testing.assert_allclose(start, module.norm.running_var.numpy(), rtol=2.0**-11)


def test_beside_updates_in_full_statistics_are_halves_both_ways():
    server = shared()._replace(fine=True)
    for weights, mean in ((1.0, 3.0), 1.5), ((1.0, 1.0), 2.0):
        start, known = receive(server.layout, shared().buffers, server.broadcast())
        assert not known.any()
        ends = changed(start, mean=3.0, var=0.7), changed(start, mean=1.0, var=0.1)
        frames = [describe_change(server.layout, start, end, known) for end in ends]
        messages = [server.read(frame) for frame in frames]
        server = server.step(list(zip(weights, messages, strict=True)))
        np.testing.assert_allclose(server.buffers.values[7:10], mean, rtol=2.0**-10)
        np.testing.assert_allclose(server.received[0].values, server.buffers.values, rtol=2.0**-10)


def test_a_change_of_what_is_no_number_is_refused():
    server = shared()
    values = np.zeros(13)
    values[:4] = 1.0  # of the mask, which is -inf
    first = np.array([True, False, False, False, False])
    message = StatisticsMessage(values, np.zeros(1, np.int64), first, first)
    frame = encode_statistics(message, sections(server.layout), "change")
    with pytest.raises(WireError, match="the change of 'mask' does not lead to numbers"):
        server.read(frame)
