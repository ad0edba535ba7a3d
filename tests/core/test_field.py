"""Grids, and every compressor of the field against its paper's formula, written down again."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.linalg import hadamard as hadamard_matrix

from aqg.core import grids
from aqg.core.downlink import Condensed
from aqg.core.grids import measure, num_levels, quantize
from aqg.core.messages import (
    Skip,
    Upload,
    block_lengths,
    energy_of,
    num_nonzero,
    points_of,
    random_signs,
)
from aqg.core.quantizers import choose_width, largest
from aqg.core.recipes import make_recipe
from aqg.core.round import init_client, respond
from aqg.core.server import Step, broadcast, finish_round, init_server, publish_round, take_message
from aqg.core.space import NumpySpace
from aqg.core.stages import OwnMovement, RunningAverage, level_factors
from aqg.sim.engine import FastSimulation
from aqg.sim.training import Dropout, LocalTraining, Training

from tests.problems import check_engines, crossed, tiny_problem

SIZE = 400
HALF = 2.0**-11
"""Half an ulp of a half-precision number."""


def gradients(rounds, seed=0, size=SIZE):
    """A random walk, so that neighbors in time are alike."""
    steps = np.random.default_rng(seed).standard_t(3, (rounds, size))
    return np.cumsum(0.3 * steps, axis=0) + np.linspace(1, 2, size)


def first_message(spec, vector, number=1, **options):
    """Return what a new client sends."""
    recipe = make_recipe(spec)
    state = init_client(recipe, len(vector), np.dtype("float64"))
    return respond(recipe, state, vector, 0.0, (0, 0, number), **options)[1]


def play(spec, vectors):
    """Feed vectors to one client; yield each, the message, its values, and the client's state."""
    recipe = make_recipe(spec)
    state = init_client(recipe, vectors.shape[1], np.dtype("float64"))
    for k, vector in enumerate(vectors, start=1):
        state, message = respond(recipe, state, vector, 0.0, (0, 0, k))
        sent = None if isinstance(message, Skip) else message.values(np.float64)
        yield vector, message, sent, state


def top(vector, k):
    """The operator Top_k of the papers."""
    kept = np.zeros_like(vector)
    order = np.argsort(-np.abs(vector), kind="stable")[:k]
    kept[order] = vector[order]
    return kept


def ternary(kept):
    """Algorithm 1 of STC's paper; the mean is rounded up."""
    return grids.round_up_to_bfloat16(np.abs(kept[kept != 0]).mean()) * np.sign(kept)


@pytest.mark.parametrize(
    ("spec", "k", "of", "rel"),
    [("stc:keep=0.05", 20, ternary, 1e-12), ("topk:keep=0.02", 8, np.copy, HALF)],
)
def test_error_feedback_is_mem_sgd(spec, k, of, rel):
    residual = np.zeros(SIZE)
    for vector, _, sent, state in play(spec, gradients(30)):
        carried = residual + vector
        assert sent == pytest.approx(of(top(carried, k)), rel=rel)
        residual = carried - sent
        assert np.array_equal(state.stages["feedback"]["residual"][0], residual)


def test_dgc_corrects_momentum_and_forgets_it_where_something_was_sent():
    velocity, waiting = np.zeros(SIZE), np.zeros(SIZE)
    for vector, _, sent, state in play("dgc:keep=0.05:momentum=0.8", gradients(30)):
        velocity = 0.8 * velocity + vector
        waiting = waiting + velocity
        assert sent == pytest.approx(top(waiting, 20), rel=HALF)
        velocity[sent != 0] = 0
        waiting = waiting - sent
        kept = state.stages["feedback"]
        assert np.array_equal(kept["residual"][0], waiting)
        assert np.array_equal(kept["velocity"][0], velocity)


EF21 = [("ef21:", 0, 1), ("econtrol:eta=0.1:", 0.1, 1), ("econtrol:eta=1:", 1, 1)]
EF21 += [("ef21-m:eta=0.2:", 0, 0.2)]


@pytest.mark.parametrize(("spec", "eta", "weight"), EF21)
def test_ef21_and_what_became_of_it(spec, eta, weight):
    """``δ = C(ηe + v - h)``, ``h ← h + δ``, ``e ← e + v - h``, for a running average ``v``."""
    error, estimate, average = np.zeros(SIZE), np.zeros(SIZE), None
    for vector, _, sent, state in play(f"{spec}keep=0.05", gradients(30, seed=4)):
        average = vector if average is None else (1 - weight) * average + weight * vector
        assert sent == pytest.approx(top(eta * error + average - estimate, 20), rel=2 * HALF)
        estimate = estimate + sent
        error = error + average - estimate
        assert state.track.position[0] == pytest.approx(estimate, rel=1e-12)
        if eta:
            assert state.stages["feedback"]["residual"][0] == pytest.approx(eta * error, abs=1e-9)
        if weight < 1:
            assert state.stages["average"]["average"][0] == pytest.approx(average, rel=1e-12)


@pytest.mark.parametrize("zeta", [0.5, 4.0, 16.0])
def test_clag_follows_the_three_point_rule(zeta):
    vectors, estimate, count = gradients(60, seed=4), np.zeros(SIZE), 0
    before = vectors[0]
    for vector, _, sent, state in play(f"clag:keep=0.5:zeta={zeta}", vectors):
        gap = np.sum((vector - estimate) ** 2)
        if gap > zeta * np.sum((vector - before) ** 2):
            count += 1
            assert sent == pytest.approx(top(vector - estimate, SIZE // 2), rel=HALF)
            estimate = estimate + sent
        else:
            assert sent is None
        before = vector
        assert np.array_equal(state.track.position[0], estimate)
        assert np.array_equal(state.stages["own_movement"]["last"][0], vector)
    assert 0 < count <= 60
    assert (count < 60) == (zeta > 0.5)


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1.0, 1e6, 1e20])
def test_fp16_is_half_precision_also_where_plain_halves_end(scale):
    vector = gradients(1, seed=6)[0] * scale
    sent = first_message("fp16", vector).values(np.float64)
    assert sent == pytest.approx(vector, rel=HALF, abs=scale * 1e-6)
    normal = np.abs(vector) > 2.0**-13  # where neither way makes subnormal numbers
    if scale == 1.0:
        assert np.array_equal(sent[normal], vector.astype(np.float16).astype(np.float64)[normal])


def test_blockwise_is_the_absolute_maximum_rule_of_its_paper():
    vector = np.random.default_rng(7).standard_t(2, 1000)
    message = first_message("blockwise8", vector)
    sent = message.values(np.float64)
    for start in range(0, 1000, 256):
        block, got = vector[start : start + 256], sent[start : start + 256]
        largest_one = np.abs(block).max()
        paper = np.rint(block / largest_one * 127) * largest_one / 127
        # The step is rounded up to 8 significant bits: levels move by one at most.
        assert np.abs(got - paper).max() <= 1.01 * largest_one / 127
        assert np.abs(got - block).max() <= 0.5 * 1.008 * largest_one / 127
    assert message.values(np.float32).tolist() == sent.tolist()


def words_of_splitmix64(seed, count):
    """The generator as its author wrote it."""
    mask, words = (1 << 64) - 1, []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        word = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
        words.append(word ^ word >> 31)
    return words


WIDTHS = [(0, 1), (1, 1), (1, 2), (1, 4), (0, 0.3), (1, 0.3)]


@pytest.mark.parametrize(("unbiased", "width"), WIDTHS)
def test_eden_is_the_formula_of_its_paper(unbiased, width):
    """It rounds the rotated vector to the points of a normal, or to its signs.

    Below one bit, it does so with coordinates drawn at random, and says nothing of the others.
    """
    points = points_of(width) / 4096 if width > 1 else np.array([-1, 1])
    vectors = gradients(4, seed=8)
    for vector, message, sent, _ in play(f"eden:unbiased={unbiased}:width={width}", vectors):
        assert message.width == max(1, width)
        taken, factor = np.arange(SIZE), 1.0
        if width < 1:
            words = words_of_splitmix64(message.seed + 2**32, SIZE)
            taken = np.sort(np.argsort(np.array(words, np.uint64))[: round(width * SIZE)])
            factor = SIZE / len(taken) if unbiased else 1.0
        padded = np.zeros(sum(block_lengths(len(taken))))
        padded[: len(taken)] = vector[taken]
        signs = random_signs(message.seed, len(padded))
        expected, start = np.empty_like(padded), 0
        for length in block_lengths(len(taken)):
            block = slice(start, start + length)
            start += length
            rotation = hadamard_matrix(length) * signs[block] / np.sqrt(length)
            rotated, squares = rotation @ padded[block], padded[block] @ padded[block]
            distances = np.abs(rotated[:, None] * np.sqrt(length / squares) - points)
            chosen = points[distances.argmin(1)]
            product = rotated @ chosen
            scale = squares / product if unbiased else product / (chosen @ chosen)
            expected[block] = factor * scale * rotation.T @ chosen
        assert sent[taken] == pytest.approx(expected[: len(taken)], rel=1e-6, abs=1e-5)
        assert not np.delete(sent, taken).any()
        assert num_nonzero(message) <= len(taken)
        assert energy_of(message) == pytest.approx(sent @ sent)


def test_random_signs_are_those_of_splitmix64():
    # The first numbers of the generator for this seed, as its author's code gives them.
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert words_of_splitmix64(1234567, 3) == words
    expected = [2 * (word >> bit & 1) - 1 for word in words for bit in range(64)]
    assert random_signs(1234567, 192).tolist() == expected


def test_eden_is_unbiased_and_drive_has_the_smaller_error():
    vector = gradients(1, seed=9, size=1024)[0]
    squared = vector @ vector
    # The papers' constants for many dimensions; with more bits, those of a normal distribution.
    wanted = {(1, 1): np.pi / 2 - 1, (0, 1): 1 - 2 / np.pi, (1, 2): 0.133, (1, 4): 0.0096}
    # A quarter of the coordinates: with four times their values, or as they are.
    wanted |= {(1, 0.25): 4 * np.pi / 2 - 1, (0, 0.25): 1 - 0.25 * 2 / np.pi}
    for (unbiased, width), error in wanted.items():
        spec = f"eden:unbiased={unbiased}:width={width}"
        draws = [first_message(spec, vector, k).values(np.float64) for k in range(100)]
        errors = np.array([np.sum((draw - vector) ** 2) for draw in draws]) / squared
        assert errors.mean() == pytest.approx(error, rel=0.05)
        assert unbiased or errors.max() < 1
        # Of so many draws the mean has a hundredth of the error, if there is no bias.
        bias = np.sum((np.mean(draws, axis=0) - vector) ** 2) / squared
        assert bias < 2 * error / 100 if unbiased else bias > 0.1


def test_fedpaq_is_qsgd_with_s_levels():
    vector = gradients(1, seed=10, size=60)[0]
    norm = np.linalg.norm(vector)
    messages = [first_message("fedpaq:levels=5", vector, k) for k in range(4000)]
    draws, step = [message.values(np.float64) for message in messages], messages[0].step
    assert norm / 5 <= step <= norm / 5 * (1 + 1 / 127)
    for draw in draws[:50]:  # one of the two multiples next to the coordinate
        assert np.abs(draw - vector).max() < step
        assert np.array_equal(draw, np.rint(draw / step) * step)
    share = np.abs(vector) / step - np.floor(np.abs(vector) / step)
    deviation = step * np.sqrt(share * (1 - share) / 4000)
    assert (np.abs(np.mean(draws, axis=0) - vector) <= 5 * deviation + 1e-12).all()


def test_aquila_chooses_its_papers_width_and_gate():
    vectors = gradients(40, seed=11)
    recipe = make_recipe("aquila:beta=0.25")
    server = init_server(recipe, np.zeros(SIZE), num_clients=1)
    state = init_client(recipe, SIZE, np.dtype("float64"))
    widths, step_size, before = [], 0.1, None
    for k, vector in enumerate(vectors, start=1):
        told = broadcast(recipe, server)
        delta = vector - state.track.position[0]
        radius = np.abs(delta).max()
        width = int(np.ceil(np.log2(radius * np.sqrt(SIZE) / np.linalg.norm(delta) + 1)))
        tau = 1 / (2**width - 1)
        quantized = 2 * tau * radius * np.floor((delta + radius) / (2 * tau * radius) + 0.5)
        quantized -= radius
        weight = np.sum(quantized**2) + np.sum((delta - quantized) ** 2)
        moved = 0.0 if before is None else np.sum((told.parameters - before) ** 2)
        limit = 0.25 * moved / step_size**2
        state, message = respond(recipe, state, vector, told.movement, (0, 0, k))
        if abs(weight / max(limit, 1e-300) - 1) > 0.02:  # steps are rounded up by up to 1/127
            assert (weight > limit) == isinstance(message, Upload)
        if isinstance(message, Upload):
            assert message.width == width
            assert message.values(np.float64) == pytest.approx(quantized, abs=2.1 * tau * radius)
        widths.append(message.width)
        before = told.parameters
        server = finish_round(recipe, take_message(recipe, server, 0, message), step_size)
    assert 0 in widths
    assert len(set(widths)) >= 3
    for seed in range(20):  # it is never further off than before
        delta = np.random.default_rng(seed).standard_t(1.5, 300)
        [(*_, state)] = play("aquila", delta[None])
        assert np.sum((state.track.position[0] - delta) ** 2) <= 1.02 * np.sum(delta**2)
    assert choose_width(1.0, 0.0, 9) == 1


def test_dadaquant_doubles_its_levels_on_plateaus():
    phi, psi = 5, 0.5
    recipe = make_recipe(f"dadaquant:q=2:phi={phi}:psi={psi}")
    falling = np.linspace(3, 2, 20)
    plateau = np.tile([1.7, 2.0, 2.3], 10)
    losses = np.concatenate([falling, plateau, np.linspace(2, 1, 20), [np.nan, 1.5]])
    state = init_client(recipe, SIZE, np.dtype("float64"))
    vector = gradients(1, seed=13)[0]
    q, changed, averages, levels = 2, 0, [], []
    for k, loss in enumerate(losses, start=1):
        if np.isfinite(loss):
            averages.append(psi * averages[-1] + (1 - psi) * loss if averages else loss)
            round_number = len(averages)
            if round_number - changed >= phi and averages[-1] >= averages[-phi]:
                q, changed = 2 * q, round_number
        state, message = respond(recipe, state, vector, 0.0, (0, 0, k), loss)
        norm = np.linalg.norm(vector)
        assert norm / q <= message.step <= norm / q * (1 + 1 / 127)
        assert np.abs(message.values(np.float64) - vector).max() < message.step
        levels.append(q)
    assert levels[0] == levels[19] == 2
    assert levels[49] >= 16  # the plateau
    assert levels[69] == levels[54]  # falling again
    # Without a loss it keeps its levels.
    rounds = play("dadaquant:phi=2:psi=0", gradients(10, seed=14))
    assert {message.width for _, message, *_ in rounds} == {2}


def test_the_largest_are_taken_in_front_first_and_zeros_never():
    assert largest(np.array([1.0, -1.0, 1.0, 2.0]), 2).tolist() == [0, 3]
    assert largest(np.array([0.0, 3.0, 0.0]), 2).tolist() == [1]
    assert largest(np.zeros(5), 5).tolist() == []
    message = first_message("stc", np.zeros(SIZE))
    assert (message.step, np.count_nonzero(message.values(np.float64))) == (0.0, 0)
    assert len(first_message("topk", np.zeros(SIZE)).indices) == 0


def test_qsgd_with_buckets_has_a_norm_for_each():
    vectors = gradients(200, seed=9, size=300)
    vectors[:] = vectors[0]
    sums = np.zeros(300)
    for _, message, sent, _ in play("qsgd:bucket=128", vectors):
        assert message.block == 128
        for start in (0, 128, 256):
            part = vectors[0][start : start + 128]
            step = np.linalg.norm(part) / 7
            levels = sent[start : start + 128] / message.steps[start // 128]
            assert step <= message.steps[start // 128] <= step * 1.008
            assert np.array_equal(levels, np.rint(levels))
            error = np.abs(sent[start : start + 128] - part)
            assert error.max() <= message.steps[start // 128] * (1 + 1e-9)
        sums += sent
    assert sums / len(vectors) == pytest.approx(vectors[0], abs=5 * 1.1 / 200**0.5)


def test_stc_both_keeps_the_same_share_on_the_way_down():
    recipe = make_recipe("stc-both:keep=0.02")
    step = Step(1.0, downlink=Condensed(keep=0.02))
    state = init_server(recipe, np.zeros(SIZE), 2, step)
    for client in range(2):
        message = first_message("stc-both:keep=0.02", gradients(1, seed=client)[0])
        state = take_message(recipe, state, client, message)
    before = state.model.total.copy()
    assert np.count_nonzero(before) > 8
    state, entry = publish_round(recipe, state, step)
    kept = top(before, 8)
    mean = grids.round_up_to_bfloat16(np.abs(kept[kept != 0]).mean())
    expected = -grids.nearest_power_of_two(mean) * np.sign(kept)
    assert np.array_equal(entry.position.values(np.float64), expected)
    assert state.model.rest - state.parameters == pytest.approx(before)


@pytest.mark.parametrize("name", ["laq", "aqg", "aqg-2"])
def test_xi_scales_the_tolerance_of_the_published_rules(name):
    assert make_recipe(f"{name}:xi=1") == make_recipe(name)
    assert make_recipe(f"{name}:xi=0.1").movement.of((2.0,) * 10) == pytest.approx(0.2)


def test_dadaquant_gives_clients_levels_by_their_weights():
    """The fewest levels of all with the same variance of the weighted sum; ``q`` for equal ones."""
    weights = np.array([0.2, 0.8, 2.0])
    factors = level_factors(weights)
    assert factors / weights ** (2 / 3) == pytest.approx([factors[1] / 0.8 ** (2 / 3)] * 3)
    assert np.sum(weights**2 / factors**2) == pytest.approx(np.sum(weights**2))
    assert factors.sum() < 3
    assert level_factors(np.full(3, 1.0)) is None
    vector = gradients(1)[0]
    for factor in (1.0, *factors):
        message = first_message("dadaquant:q=8", vector, loss=1.0, level_factor=factor)
        num_levels = round(8 * factor)
        assert message.step == pytest.approx(np.linalg.norm(vector) / num_levels, rel=1 / 127)
        assert message.width == num_levels.bit_length() + 1


def after(*stages, name):
    """Return a recipe with stages before its own."""
    recipe = make_recipe(name)
    return dataclasses.replace(recipe, stages=(*stages, *recipe.stages))


COMBINATIONS = {
    "stc of averages": after(RunningAverage(0.3), name="stc:keep=0.2"),
    "lean by own movement": after(OwnMovement(), name="lean"),
    "clag of averages": after(RunningAverage(0.5), name="clag:zeta=4"),
    "half a bit": make_recipe("eden:width=0.5"),
}
TRAINING = Training(LocalTraining(batch_size=8, steps=3, rate=0.05), participation=0.7)


@pytest.mark.parametrize(("name", "dtype"), crossed(list(COMBINATIONS), ["float32", "float64"]))
def test_engines_agree_and_resume(name, dtype):
    problem = tiny_problem(dtype, num_clients=5, unequal=True)
    arguments = (problem, COMBINATIONS[name], 0.05, Dropout(0.2, seed=2), 3)
    check_engines(*arguments, training=TRAINING, rounds=40)


def test_only_what_a_recipe_needs_is_kept():
    used = {
        "topk": {"clients/stages/feedback/residual"},
        "ef21": {"clients/track/position"},
        "ef21-m": {"clients/track/position", "clients/stages/average/average"},
        "clag": {"clients/track/position", "clients/stages/own_movement/last"},
        "eden": set(),
        "dadaquant": {"clients/stages/loss_schedule/notes"},
        "auto": {"clients/track/position", "clients/stages/wider_tolerance/energy"},
    }
    for name, expected in used.items():
        arrays = FastSimulation(tiny_problem(), make_recipe(name), 0.1).state().to_arrays()
        kept = {key for key, array in arrays.items() if array.size}
        slots = {key for key in kept if key.startswith("clients/stages/")}
        assert slots | (kept & {"clients/track/position"}) == expected, name


def test_a_running_average_starts_at_the_first_vector_and_refuses_what_no_grid_holds():
    space = NumpySpace()
    zeros, vector, huge = np.zeros(3), np.array([1.0, -2.0, 4.0]), np.array([0.0, 1e31, 0.0])
    averages, vectors = np.stack([zeros, vector, vector]), np.stack([vector, zeros, huge])
    blended = space.blend(averages, vectors, 0.25)
    assert blended.tolist() == [vector.tolist(), [0.75, -1.5, 3.0], huge.tolist()]
    rows, earlier = np.stack([vector, vector]), np.stack([zeros, np.ones(3)])
    assert space.distances(rows, earlier).tolist() == [0.0, 18.0]


ANY_WIDTH = st.integers(1, 16)


def grid_step(grid, width, radius, mean_abs):
    """Return the step a client sends for a vector with this radius and mean absolute value."""
    if grid is grids.Grid.MIDRISE:
        return grids.round_up_to_bfloat16(2 * radius / ((1 << width) - 1))
    if width == 1:
        return grids.round_up_to_bfloat16(mean_abs) if mean_abs >= grids.MIN_STEP else 0.0
    return grids.round_up_to_bfloat16(radius / ((1 << (width - 1)) - 1))


def vectors(dtype):
    """Any finite vector within the grids' range, subnormals and zeros included."""
    bits = 32 if dtype is np.float32 else 64
    values = st.floats(-grids.MAX_RADIUS, grids.MAX_RADIUS, width=bits, allow_nan=False)
    return arrays(dtype, st.integers(1, 40), elements=values)


ANY_VECTOR = st.one_of(vectors(np.float32), vectors(np.float64))


def rounded(vector, grid, width, step):
    """Return what the levels of a vector stand for, in float64."""
    return grids.value_table(grid, width, step, np.float64)[quantize(vector, grid, width, step)]


@given(st.floats(grids.MIN_STEP, grids.MAX_RADIUS))
def test_step_is_the_next_bfloat16_up(value):
    step = grids.round_up_to_bfloat16(value)
    assert step >= value
    bits = np.float32(step).view(np.uint32)
    assert bits & 0xFFFF == 0
    below = np.uint32(bits - (1 << 16)).view(np.float32)
    assert float(below) < value
    assert step <= value * (1 + 2**-7)
    assert grids.is_valid_step(step)


@pytest.mark.parametrize("step", [float("nan"), float("inf"), -1.0, 1.001, 2.0**110, 2.0**-130])
def test_steps_no_client_can_send(step):
    assert not grids.is_valid_step(step)


@given(ANY_WIDTH, st.sampled_from(list(grids.Grid)), st.floats(grids.MIN_STEP, grids.MAX_RADIUS))
def test_values_are_exact_in_float32(width, grid, raw_step):
    step = grids.round_up_to_bfloat16(raw_step)
    count = num_levels(grid, width)
    single = grids.value_table(grid, width, step, np.float32)[:count]
    double = grids.value_table(grid, width, step, np.float64)[:count]
    assert np.array_equal(single.astype(np.float64), double)
    assert np.array_equal(double, -double[::-1])
    assert np.all(np.diff(double) > 0)


@given(ANY_VECTOR, ANY_WIDTH)
def test_midtread_never_increases_the_error(vector, width):
    step = measure(vector, grids.Grid.MIDTREAD, width).steps[width - 1].item()
    exact = vector.astype(np.float64)
    error = rounded(vector, grids.Grid.MIDTREAD, width, step) - exact
    largest = np.abs(exact).max() or 1.0  # scaled to it, squares do not underflow
    assert np.linalg.norm(error / largest) <= np.linalg.norm(exact / largest) * (1 + 1e-12)
    if width > 1:  # coordinate by coordinate, to the last bit
        assert np.all(np.abs(error) <= np.abs(exact))


@given(ANY_VECTOR, ANY_WIDTH, st.sampled_from(list(grids.Grid)))
def test_levels_are_the_nearest(vector, width, grid):
    """No other level is closer, up to the rounding of one division; steps are those of the grid."""
    step = measure(vector, grid, width).steps[width - 1].item()
    sizes = np.abs(vector)
    of_grid = grid_step(grid, width, float(sizes.max()), float(sizes.mean(dtype=np.float64)))
    is_mean = width == 1 and grid is grids.Grid.MIDTREAD  # a sum may round in another order
    assert step == (pytest.approx(of_grid, rel=1 / 128) if is_mean else of_grid)
    levels = quantize(vector, grid, width, step)
    table = grids.value_table(grid, width, step, np.float64)[: num_levels(grid, width)]
    distance = np.abs(table[:, None] - vector.astype(np.float64))
    best = distance.min(axis=0)
    chosen = distance[levels, np.arange(len(vector))]
    slack = 2.0 ** (width - 21) if vector.dtype == np.float32 else 2.0 ** (width - 50)
    assert np.all(chosen <= best + slack * step)


SCALES = st.sampled_from([1e-33, 1e-20, 1e-6, 1.0, 1e6, 1e25])


@given(
    st.integers(1, 3000),
    st.integers(0, 2**32 - 1),
    SCALES,
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from(list(grids.Grid)),
    st.integers(1, 8),
)
def test_all_widths_in_one_pass(size, seed, scale, dtype, grid, max_width):
    vector = (np.random.default_rng(seed).standard_normal(size) * scale).astype(dtype)
    stats = measure(vector, grid, max_width)
    exact = vector.astype(np.float64)
    total = float(exact @ exact)
    tolerance = 1e-5 if dtype is np.float32 else 1e-12
    assert stats.in_range
    assert stats.squared_norm == pytest.approx(total, rel=tolerance)
    errors = [  # ‖Q_b(Δ) − Δ‖²
        float(np.sum((rounded(vector, grid, width, step) - exact) ** 2))
        for width, step in enumerate(stats.steps.tolist(), start=1)
    ]
    approximately = pytest.approx(errors, rel=tolerance * 10, abs=tolerance * total * 1e-3)
    assert stats.errors.tolist() == approximately
    values = rounded(vector, grid, max_width, stats.steps[-1].item())
    assert stats.quantized_norm == pytest.approx(float(values @ values), rel=tolerance)


@given(
    arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 50)), elements=st.floats(-9, 9)),
    st.sampled_from(list(grids.Grid)),
)
def test_leading_axes_equal_single_rows(rows, grid):
    together = measure(rows[None], grid, 4)
    assert together.errors.shape == (1, len(rows), 4)
    for index, row in enumerate(rows):
        alone = measure(row, grid, 4)
        for field, single in zip(together, alone, strict=True):
            assert np.array_equal(field[0, index], single)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e31])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bad_values_are_seen_and_do_not_spread(bad, dtype):
    rows = np.ones((3, 5000), dtype)
    rows[1, 4321] = bad
    stats = measure(rows, grids.Grid.MIDTREAD, 4)
    assert stats.in_range.tolist() == [True, False, True]
    assert stats.squared_norm[[0, 2]].tolist() == [5000.0, 5000.0]
