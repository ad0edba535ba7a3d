"""Statistics beside the model: averaged with the clients' weights; only what changes travels."""

from __future__ import annotations

import numpy as np
import pytest

from aqg.errors import GradientError, WireError

torch = pytest.importorskip("torch")
nn = torch.nn

from aqg.core.step_sizes import Fixed  # noqa: E402
from aqg.objectives.layout import Buffers, ModelLayout  # noqa: E402  (needs torch)
from aqg.objectives.statistics import SharedStatistics, describe_change  # noqa: E402


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((4,), -torch.inf))
        self.register_buffer("scale", torch.ones(3))
        self.norm = nn.BatchNorm1d(3)


def shared(precision: str = "exact") -> SharedStatistics:
    module = Masked()
    layout = ModelLayout.of(module)
    return SharedStatistics.first(layout, layout.read_buffers(module), precision)


def changed(start: Buffers, **values: float) -> Buffers:
    """Return buffers with whole tensors set; in `Masked` they lie as listed here."""
    places = {"mask": slice(0, 4), "scale": slice(4, 7), "mean": slice(7, 10), "var": slice(10, 13)}
    new = start.values.copy()
    for name, value in values.items():
        if name != "batches":
            new[places[name]] = value
    return Buffers(new, start.counts + int(values.get("batches", 0)))


def upload(server: SharedStatistics, **values: float) -> bytes:
    after = changed(server.buffers, **values)
    return describe_change(server.layout, server.buffers, after, server.precision)


def test_the_average_has_the_weights_of_the_clients() -> None:
    server = shared()
    frames = [
        (3.0, upload(server, mean=1.0, batches=4)),
        (1.0, upload(server, mean=5.0, batches=9)),
    ]
    server = server.step([(weight, server.read(frame)) for weight, frame in frames])
    np.testing.assert_array_equal(server.buffers.values[7:10], 2.0)
    assert server.buffers.counts.tolist() == [9]


def test_a_client_that_sends_nothing_is_as_it_was() -> None:
    server = shared()
    messages = [(1.0, server.read(upload(server, var=3.0))), (1.0, server.read(b""))]
    np.testing.assert_array_equal(server.step(messages).buffers.values[10:13], 2.0)
    assert server.step([]) is server


def test_the_mean_of_statistics_has_the_weights_of_the_mean_of_models() -> None:
    start = shared()
    server = start._replace(average=8.0)
    plain, rule = start, Fixed(average=8.0)
    models = rule.init(start.buffers.values[4:])
    for value in (3.0, -1.0, 2.0, 7.0):
        frame = upload(server, mean=value, scale=value**2, batches=2)
        server = server.step([(1.0, server.read(frame))])
        plain = plain.step([(1.0, plain.read(upload(plain, mean=value, scale=value**2)))])
        models = rule.follow(models, server.buffers.values[4:])
        np.testing.assert_allclose(server.averaged.values[4:], models.mean, rtol=1e-14)
        np.testing.assert_array_equal(server.buffers.values, plain.buffers.values)
        assert plain.averaged is plain.buffers
    assert np.isneginf(server.averaged.values[:4]).all()  # constants stay what they are
    assert server.averaged.counts.tolist() == [8]
    assert 1.5 < server.averaged.values[7] < 7.0


def test_constants_never_travel_and_other_buffers_do_once_they_change() -> None:
    server = shared()
    per_tensor = 4 * 3
    first = len(server.broadcast())
    assert server.travels.tolist() == [False, False, True, True, True]
    server = server.step([(1.0, server.read(upload(server, scale=2.0)))])
    assert server.travels.tolist() == [False, True, True, True, True]
    assert len(server.broadcast()) == first + per_tensor
    fresh = shared()
    found = fresh.receive(server.broadcast())
    np.testing.assert_array_equal(found.values, server.buffers.values)
    assert np.isneginf(found.values[:4]).all()


def test_nothing_is_sent_where_nothing_changed() -> None:
    server = shared()
    assert upload(server) == b""
    layout = ModelLayout.of(nn.Linear(2, 2))
    plain = SharedStatistics.first(layout, layout.read_buffers(nn.Linear(2, 2)))
    assert plain.broadcast() == b""


def test_half_precision_is_within_its_bound_and_no_variance_turns_negative() -> None:
    server = shared("half")
    random = np.random.default_rng(0)
    clients = [
        changed(server.buffers)._replace(values=np.concatenate([server.buffers.values[:10], var]))
        for var in random.lognormal(0, 6, (20, 3))
    ]
    frames = [describe_change(server.layout, server.buffers, c, "half") for c in clients]
    after = server.step([(1.0, server.read(frame)) for frame in frames]).buffers.values[10:13]
    exact = np.mean([client.values[10:13] for client in clients], axis=0)
    assert (after > 0).all()
    # Once up, once down.
    np.testing.assert_allclose(after, exact, rtol=2 * 2.0**-11)


def test_clients_start_from_the_very_numbers_the_server_holds() -> None:
    server = shared("half")
    server = server.step([(1.0, server.read(upload(server, mean=np.pi, var=0.1)))])
    np.testing.assert_array_equal(
        shared("half").receive(server.broadcast()).values, server.buffers.values
    )


def test_statistics_that_are_no_numbers_are_named() -> None:
    server = shared()
    with pytest.raises(GradientError, match=r"'norm\.running_var' holds NaN or infinity"):
        upload(server, var=np.nan)
    with pytest.raises(WireError):
        server.read(b"\x51\x00")
