"""Laplace noise: the right scale, the exact law, the grid, and no part of a vector without it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedclust.privacy import laplace
from fedclust.privacy.clipping import clip_norm
from fedclust.privacy.importance import join_important, split_important
from fedclust.privacy.laplace import GRID_STEPS, coordinate_scale, discrete_laplace, laplace_noise, randomise
from fedclust.privacy.randomness import SecureRandom, SimulatedRandom

pytestmark = pytest.mark.filterwarnings("ignore:simulated noise")


def simulated(client: int = 0, round: int = 0, seed: int = 0) -> SimulatedRandom:
    return SimulatedRandom(seed, round, client, "laplace")


def test_scale_by_hand() -> None:
    assert coordinate_scale(1.0, 0.5) == 4.0
    assert coordinate_scale(1.0, 1.0) == 2.0
    assert coordinate_scale(3.0, 2.0) == 3.0
    assert "coordinate-level" in (coordinate_scale.__doc__ or "")


def test_mean_absolute_noise_is_the_scale() -> None:
    n = 100_000
    for epsilon, wanted in ((0.5, 4.0), (1.0, 2.0)):
        noise = laplace_noise(n, coordinate_scale(1.0, epsilon), simulated())
        # Standard errors: .32 % of the mean absolute value, .7 % of the variance; the mean's is .0045 scales.
        assert float(noise.abs().mean()) == pytest.approx(wanted, rel=0.02)
        assert float(noise.var()) == pytest.approx(2 * wanted**2, rel=0.04)
        assert abs(float(noise.mean())) < 0.025 * wanted


def test_tails_are_those_of_the_law() -> None:
    n = 400_000
    noise = laplace_noise(n, 1.0, simulated()).abs()
    for threshold in (0.01, 0.5, 1.0, 3.0, 6.0, 8.0):
        expected = math.exp(-threshold) * n
        assert abs(int((noise > threshold).sum()) - expected) < 5 * math.sqrt(expected)


def test_the_secure_default_has_the_same_law_and_never_repeats() -> None:
    first, second = laplace_noise(100_000, 4.0), laplace_noise(100_000, 4.0, SecureRandom())
    # Eight standard errors.
    assert float(first.abs().mean()) == pytest.approx(4.0, rel=8 / math.sqrt(100_000))
    assert not (first == second).any()


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_the_discrete_law_is_exact(steps: int) -> None:
    n = 200_000
    drawn = discrete_laplace(n, steps, simulated())
    ratio = math.exp(-1 / steps)
    limit = 6 * steps
    centre = (1 - ratio) / (1 + ratio)
    expected = np.array([centre * ratio ** abs(x) for x in range(-limit, limit + 1)]) * n
    counts = np.array([(drawn == x).sum() for x in range(-limit, limit + 1)])
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = 2 * limit + 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_no_step_of_the_grid_is_left_out() -> None:
    # The fraction of a step of b/2**32 must be uniform down to its lowest bits.
    drawn = discrete_laplace(200_000, GRID_STEPS, simulated())
    for bits in (drawn & 0xFF, (drawn >> 8) & 0xFF):
        counts = np.bincount(bits, minlength=256)
        statistic = float(((counts - 200_000 / 256) ** 2).sum() / (200_000 / 256))
        assert statistic < 255 + 5 * math.sqrt(2 * 255)


def test_chunks_do_not_repeat() -> None:
    drawn = discrete_laplace(3 * laplace._CHUNK + 5, GRID_STEPS, simulated())
    assert len(np.unique(drawn)) > 0.9999 * len(drawn)


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


def test_type_and_shape_are_kept_and_the_vector_too() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        vector = torch.ones(3, 2, dtype=dtype)
        result = randomise(vector, 1.0, 1.0, simulated())
        assert result.dtype == dtype
        assert result.shape == (3, 2)
        assert torch.equal(vector, torch.ones(3, 2, dtype=dtype))
    assert laplace_noise((2, 3), 1.0, simulated()).shape == (2, 3)
    assert laplace_noise(0, 1.0).shape == (0,)
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
    with pytest.raises(ValueError, match="scale must be"):
        laplace_noise(3, value)


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
    with pytest.raises(ValueError, match="shape must be"):
        laplace_noise((2, -1), 1.0)
