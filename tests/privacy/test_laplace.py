"""Laplace noise: the right scale, the exact law, the grid, and no part of a vector without it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from fedclust.privacy import laplace, randomness
from fedclust.privacy.clipping import clip_norm
from fedclust.privacy.importance import join_important, split_important
from fedclust.privacy.laplace import GRID_STEPS, coordinate_scale, discrete_laplace, randomise
from fedclust.privacy.randomness import RandomSource, SecureRandom, SimulatedRandom

pytestmark = pytest.mark.filterwarnings("ignore:simulated noise")


def simulated(client: int = 0, round: int = 0, seed: int = 0) -> SimulatedRandom:
    return SimulatedRandom(seed, round, client, "laplace")


def noise(count: int, source: RandomSource | None = None) -> np.ndarray:
    """Noise of scale 1."""
    return discrete_laplace(count, GRID_STEPS, source) / GRID_STEPS


class Counting:
    """Secure words, counted."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def words(self, count: int) -> np.ndarray:
        self.asked.append(count)
        return SecureRandom().words(count)


def test_scale_by_hand() -> None:
    assert coordinate_scale(1.0, 0.5) == 4.0
    assert coordinate_scale(1.0, 1.0) == 2.0
    assert coordinate_scale(3.0, 2.0) == 3.0
    assert "coordinate-level" in (coordinate_scale.__doc__ or "")


def test_mean_absolute_noise_is_the_scale() -> None:
    n = 100_000
    for epsilon, wanted in ((0.5, 4.0), (1.0, 2.0)):
        drawn = randomise(torch.zeros(n, dtype=torch.float64), 1.0, epsilon, simulated())
        # Standard errors: .32 % of the mean absolute value, .7 % of the variance; the mean's is .0045 scales.
        assert float(drawn.abs().mean()) == pytest.approx(wanted, rel=0.02)
        assert float(drawn.var()) == pytest.approx(2 * wanted**2, rel=0.04)
        assert abs(float(drawn.mean())) < 0.025 * wanted


def test_tails_are_those_of_the_law() -> None:
    n = 400_000
    sizes = np.abs(noise(n, simulated()))
    for threshold in (0.01, 0.5, 1.0, 3.0, 6.0, 8.0):
        expected = math.exp(-threshold) * n
        assert abs(int((sizes > threshold).sum()) - expected) < 5 * math.sqrt(expected)


def test_the_secure_default_has_the_same_law_and_never_repeats() -> None:
    first, second = noise(100_000), noise(100_000, SecureRandom())
    # Eight standard errors.
    assert float(np.abs(first).mean()) == pytest.approx(1.0, rel=8 / math.sqrt(100_000))
    assert not (first == second).any()


@pytest.mark.parametrize("steps", [1, 2, 8, 1024])
def test_the_discrete_law_is_exact(steps: int) -> None:
    n = 2_000_000
    drawn = discrete_laplace(n, steps, simulated())
    ratio = math.exp(-1 / steps)
    limit = 5 * steps
    centre = (1 - ratio) / (1 + ratio)
    expected = np.array([centre * ratio ** abs(x) for x in range(-limit, limit + 1)]) * n
    counts = np.bincount(np.clip(drawn, -limit - 1, limit + 1) + limit + 1, minlength=2 * limit + 3)
    tail = n * centre * ratio ** (limit + 1) / (1 - ratio)
    expected = np.concatenate([[tail], expected, [tail]])
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Each way a thousandth would be too much by chance; the seed is fixed.
    assert chi2.isf(0.999, counts.size - 1) < statistic < chi2.isf(0.001, counts.size - 1)


def test_the_law_of_the_grid_is_exact_between_its_quantiles() -> None:
    n, bins = 2_000_000, 1000
    drawn = noise(n, simulated())
    level = np.where(drawn < 0, np.exp(drawn) / 2, 1 - np.exp(-drawn) / 2)
    counts = np.bincount((level * bins).astype(np.int64), minlength=bins)
    statistic = float(((counts - n / bins) ** 2 / (n / bins)).sum())
    assert chi2.isf(0.999, bins - 1) < statistic < chi2.isf(0.001, bins - 1)


def test_no_step_of_the_grid_is_left_out() -> None:
    # The fraction of a step of b/2**32 must be uniform down to its lowest bits.
    drawn = discrete_laplace(200_000, GRID_STEPS, simulated())
    for bits in (drawn & 0xFF, (drawn >> 8) & 0xFF):
        counts = np.bincount(bits, minlength=256)
        statistic = float(((counts - 200_000 / 256) ** 2).sum() / (200_000 / 256))
        assert statistic < 255 + 5 * math.sqrt(2 * 255)


def test_chunks_do_not_repeat() -> None:
    count = 3 * laplace._AT_ONCE + 5
    source = simulated()
    drawn = np.concatenate([discrete_laplace(count, GRID_STEPS, source) for _ in range(2)])
    assert len(drawn) == 2 * count
    assert len(np.unique(drawn)) > 0.9999 * len(drawn)


def test_neighbours_are_independent() -> None:
    n = 200_000
    drawn = noise(n, simulated())
    signs, sizes = np.sign(drawn), np.minimum(np.abs(drawn), 5)
    sizes -= sizes.mean()
    for values, scale in ((signs, 1.0), (sizes, float(sizes.std()))):
        for lag in (1, 2, 5, laplace._AT_ONCE):
            # Standard error 1/√n.
            assert abs(float((values[lag:] * values[:-lag]).mean())) < 5 * scale**2 / math.sqrt(n)
    assert abs(float((signs * sizes).mean())) < 5 * float(sizes.std()) / math.sqrt(n)


@pytest.mark.parametrize("words", [1, 3, 100])
@pytest.mark.parametrize("steps", [1, 16, GRID_STEPS])
def test_values_do_not_depend_on_where_buffers_end(monkeypatch: pytest.MonkeyPatch, words: int, steps: int) -> None:
    count = 2000 if words < 100 else 20_000
    usual = discrete_laplace(count, steps, simulated())
    monkeypatch.setattr(randomness, "_WORDS_AT_ONCE", words)
    assert np.array_equal(discrete_laplace(count, steps, simulated()), usual)


def test_a_value_takes_eleven_bytes() -> None:
    count, source = 200_000, Counting()
    discrete_laplace(count, GRID_STEPS, source)
    # 4 per attempt, 3 for the rest of the fraction, 1 per success or failure, the latter two e/(e − 1) times.
    assert 11 < 4 * sum(source.asked) / count < 11.5
    assert max(source.asked) == randomness._WORDS_AT_ONCE
    few = Counting()
    discrete_laplace(1, GRID_STEPS, few)
    assert sum(few.asked) < 100


def test_clients_rounds_and_seeds_never_share_noise() -> None:
    gradient = torch.ones(1000)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    noisy = [randomise(gradient, 1.0, 1.0, simulated(*key)) for key in keys]
    for i in range(4):
        assert torch.equal(noisy[i], randomise(gradient, 1.0, 1.0, simulated(*keys[i])))
        for j in range(i):
            assert not (noisy[i] == noisy[j]).any()
    assert not (randomise(gradient, 1.0, 1.0) == randomise(gradient, 1.0, 1.0)).any()


def test_a_zero_vector_gets_noise_too() -> None:
    noisy = randomise(torch.zeros(5000), 1.0, 1.0, simulated())
    assert (noisy != 0).all()
    assert float(noisy.abs().mean()) == pytest.approx(2.0, rel=0.1)


def test_every_less_important_coordinate_is_noised_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace, "discrete_laplace", lambda count, steps, source=None: np.full(count, 100 * steps))
    vector = torch.arange(10.0)
    indices = [7, 0, 3]
    important, less = split_important(vector, indices)
    noisy = join_important(important, randomise(less, 1e3, 2e3), indices, 10)
    assert (noisy - vector).tolist() == pytest.approx([0, 100, 100, 0, 100, 100, 100, 0, 100, 100], abs=1e-4)


def test_what_is_noised_is_clipped_and_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace, "discrete_laplace", lambda count, steps, source=None: np.zeros(count, dtype=np.int64))
    vector = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for bound, epsilon in ((1.0, 1.0), (0.3, 1e4), (1e9, 7.0)):
        step = coordinate_scale(bound, epsilon) / GRID_STEPS
        result, clipped = randomise(vector, bound, epsilon), clip_norm(vector, bound)
        units = result / step
        assert float((units - units.round()).abs().max()) < 1e-3
        assert (result.abs() <= clipped.abs()).all()
        assert ((result - clipped).abs() <= step * 1.001 + clipped.abs() * 2**-39).all()


def test_a_vector_is_randomised_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(laplace, "discrete_laplace", lambda count, steps, source=None: np.arange(count) * steps)
    whole = randomise(vector, 0.5, 2.0)
    monkeypatch.setattr(laplace, "_AT_ONCE", 7)
    assert torch.equal(randomise(vector, 0.5, 2.0), whole)
    # The scale is 2 · .5 / 2.
    noise = 0.5 * torch.arange(2000).reshape(4, 500)
    assert torch.allclose(whole - noise, clip_norm(vector, 0.5), atol=1e-3)


def test_type_and_shape_are_kept_and_the_vector_too() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        vector = torch.ones(3, 2, dtype=dtype)
        result = randomise(vector, 1.0, 1.0, simulated())
        assert result.dtype == dtype
        assert result.shape == (3, 2)
        assert torch.equal(vector, torch.ones(3, 2, dtype=dtype))
    assert discrete_laplace(0, GRID_STEPS).shape == (0,)
    assert randomise(torch.zeros(0), 1.0, 1.0).shape == (0,)


def test_a_tiny_epsilon_and_a_huge_one() -> None:
    vector = torch.full((1000,), 0.01)
    assert float(randomise(vector, 1.0, 1e-6, simulated()).abs().mean()) == pytest.approx(2e6, rel=0.2)
    nearly = randomise(vector, 1.0, 2.0**30, simulated())
    assert float((nearly - vector).abs().max()) < 1e-6
    bound = 2.0**-100
    assert float(randomise(torch.zeros(1000), bound, 1.0, simulated()).abs().max()) < 30 * bound


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1"])
def test_bad_settings_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="the clipping bound must be"):
        coordinate_scale(value, 1.0)
    with pytest.raises(ValueError, match="epsilon must be"):
        randomise(torch.ones(2), 1.0, value)


def test_settings_that_no_float_can_carry_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 2"):
        coordinate_scale(1.0, 2.0**31)
    for bound, epsilon in ((1e300, 1e-300), (1e-300, 1.0)):
        with pytest.raises(ValueError, match="scale of the noise"):
            coordinate_scale(bound, epsilon)
    with pytest.raises(ValueError, match="client 3: 1 of 2 elements are NaN"):
        randomise(torch.tensor([1.0, float("nan")]), 1.0, 1.0, who="client 3")
    for steps in (0, 3, 2**33):
        with pytest.raises(ValueError, match="power of two"):
            discrete_laplace(1, steps)
    with pytest.raises(ValueError, match="count must be"):
        discrete_laplace(-1, GRID_STEPS)
