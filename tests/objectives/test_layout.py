"""What travels of a module: trainable parameters, each once; statistics, where they change."""

import numpy as np
import pytest
import torch
from torch import nn

from aqg.core.step_sizes import Fixed
from aqg.errors import ConfigError, WireError
from aqg.objectives.layout import Buffers, ModelLayout
from aqg.objectives.statistics import (
    SharedStatistics,
    describe_change,
    receive,
    sections,
)
from aqg.wire.statistics import StatisticsMessage, encode_statistics

from tests.modules import Masked, normalized


def test_names_shapes_dtypes_offsets_and_values_are_those_of_the_module():
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).double())
    layout = ModelLayout.of(module)
    specs = [("0.weight", (3, 4), "float32", 0), ("0.bias", (3,), "float32", 12)]
    specs += [("1.weight", (2, 3), "float64", 15), ("1.bias", (2,), "float64", 21)]
    assert [tuple(spec) for spec in layout.parameters] == specs
    assert layout.dtype == np.float64
    assert not layout.carries_buffers
    flat = layout.flatten(module)
    expected = [value.detach().numpy().ravel() for value in module.parameters()]
    np.testing.assert_array_equal(flat, np.concatenate(expected))
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).double())
    layout.load(other, flat)
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_patterns_choose_parameters_by_name():
    module = normalized()
    assert ModelLayout.of(module, include="2.*").num_params == 8
    layout = ModelLayout.of(module, include=["0.*", "2.*"], exclude="*.bias")
    assert [spec.name for spec in layout.parameters] == ["0.weight", "2.weight"]
    assert layout.left_out == ("0.bias", "1.bias", "1.weight", "2.bias")
    layout.load(module, layout.flatten(module))  # what is left out is no reason to refuse
    without = ModelLayout.of(module, exclude="*.running_*")
    assert without.statistics == ()
    with pytest.raises(ConfigError, match=r"include pattern 'lora\*' matches none of the 6"):
        ModelLayout.of(module, include="lora*")
    with pytest.raises(ConfigError, match="leave 0 of the 6 trainable parameters"):
        ModelLayout.of(module, exclude="*")


def test_buffers_of_the_saved_state_are_listed_apart_from_parameters():
    layout = ModelLayout.of(normalized())
    assert [spec.name for spec in layout.statistics] == ["1.running_mean", "1.running_var"]
    assert [spec.name for spec in layout.counters] == ["1.num_batches_tracked"]
    assert layout.tracked == (True, True, True)
    masked = ModelLayout.of(Masked())
    assert [spec.name for spec in masked.statistics] == ["mask"]
    assert [spec.name for spec in masked.counters] == ["positions"]
    assert masked.tracked == (False, False)
    module = normalized()
    module[1].running_var = torch.ones(4)
    with pytest.raises(ConfigError, match=r"'1\.running_var' of Sequential has shape \(4,\) now"):
        layout.read_buffers(module)


def test_another_architecture_with_equally_many_parameters_is_refused_by_name():
    first = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    second = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
    layout = ModelLayout.of(first)
    assert layout.num_params == ModelLayout.of(second).num_params
    with pytest.raises(ConfigError, match=r"'0\.weight' of Sequential is \(4, 6\) float32"):
        layout.load(second, layout.flatten(first))
    with pytest.raises(ConfigError, match=r"Linear has no tensor '0\.weight'"):
        layout.load(nn.Linear(48, 1, bias=False), layout.flatten(first))
    wider = nn.Sequential(*first, nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"'2\.weight' of Sequential is trainable"):
        layout.load(wider, layout.flatten(first))


class Tracked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((4,), -torch.inf))
        self.register_buffer("scale", torch.ones(3))
        self.norm = nn.BatchNorm1d(3)


def shared():
    module = Tracked()
    layout = ModelLayout.of(module)
    return SharedStatistics.first(layout, layout.read_buffers(module))


def changed(start, **values):
    """Return buffers with whole tensors set; in `Tracked` they lie as listed here."""
    places = {"mask": slice(0, 4), "scale": slice(4, 7), "mean": slice(7, 10), "var": slice(10, 13)}
    new = start.values.copy()
    for name, value in values.items():
        if name != "batches":
            new[places[name]] = value
    return Buffers(new, start.counts + int(values.get("batches", 0)))


def upload(server, **values):
    start = server.received[0]
    return describe_change(server.layout, start, changed(start, **values), server.travels)


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
    frames = [(3, upload(server, mean=1.0, batches=4)), (1, upload(server, mean=4.0, batches=9))]
    after = server.step([(weight, server.read(frame)) for weight, frame in frames])
    np.testing.assert_array_equal(after.buffers.values[7:10], 1.75)
    assert after.buffers.counts.tolist() == [9]
    messages = [(1.0, server.read(upload(server, var=3.0))), (1.0, server.read(b""))]
    # A client that sends nothing is as it was.
    np.testing.assert_array_equal(server.step(messages).buffers.values[10:13], 2.0)
    assert server.step([]) is server
    assert upload(server) == b""
    layout = ModelLayout.of(nn.Linear(2, 2))  # has none
    plain = SharedStatistics.first(layout, layout.read_buffers(nn.Linear(2, 2)))
    assert plain.broadcast() == b""


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
    module = Tracked()
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
