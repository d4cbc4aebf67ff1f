"""Clipping: zero, short, exactly long enough, long; bad bounds; the median of the norms."""

from __future__ import annotations

import math

import pytest
import torch

from fedclust.privacy.clipping import SMALLEST_BOUND, clip_norm, l2_norm, median_norm


def test_zero_stays_zero() -> None:
    assert torch.equal(clip_norm(torch.zeros(4), 1.0), torch.zeros(4))
    assert clip_norm(torch.zeros(0), 1.0).shape == (0,)


def test_short_stays_bit_for_bit() -> None:
    vector = torch.tensor([0.1, -0.2, 1e-30, -0.0])
    result = clip_norm(vector, 1.0)
    assert torch.equal(result.view(torch.int32), vector.view(torch.int32))
    result.zero_()
    assert vector[0] == 0.1


def test_the_bound_itself_is_not_clipped() -> None:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(clip_norm(vector, l2_norm(vector)), vector)
    assert torch.equal(clip_norm(vector, median_norm([l2_norm(vector)])), vector)
    assert l2_norm(torch.tensor([3.0, 4.0])) == 5.0


def test_long_by_hand() -> None:
    assert clip_norm(torch.tensor([6.0, -8.0], dtype=torch.float64), 5.0).tolist() == pytest.approx([3, -4], abs=1e-15)
    assert clip_norm(torch.tensor([[6.0], [-8.0]]), 5.0).shape == (2, 1)


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float64, 2e-15), (torch.float32, 2**-22), (torch.bfloat16, 2**-6)]
)
@pytest.mark.parametrize("bound", [1.0, 0.3, 1e-6, 1e3])
@pytest.mark.parametrize("d", [1, 7, 20_000])
def test_long_has_the_bound_as_norm_and_never_more(dtype: torch.dtype, rounding: float, bound: float, d: int) -> None:
    for seed in range(5):
        vector = (torch.randn(d, generator=torch.Generator().manual_seed(seed)) * 1e5).to(dtype)
        norm = l2_norm(clip_norm(vector, bound))
        assert norm <= bound
        assert norm >= bound * (1 - rounding) or norm == 0 == float(vector.abs().max())


def test_extreme_values_do_not_overflow() -> None:
    for value in (1e200, 1e-200):
        vector = torch.tensor([3 * value, 4 * value], dtype=torch.float64)
        assert l2_norm(vector) == pytest.approx(5 * value, rel=1e-14)
        assert l2_norm(clip_norm(vector, value)) == pytest.approx(value, rel=1e-14)
    assert l2_norm(clip_norm(torch.tensor([3e38, 3e38]), 1.0)) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_are_those_of_exact_sums(dtype: torch.dtype) -> None:
    # More elements than are looked at at once.
    for scale in (1.0, 1e-30, 1e30):
        vector = (torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
        exact = math.sqrt(math.fsum(x * x for x in vector.double().flatten().tolist()))
        assert l2_norm(vector) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_clipped_is_rounded_towards_zero(dtype: torch.dtype) -> None:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    bound = 0.25 * l2_norm(vector)
    exact = vector.double() * (bound / l2_norm(vector))
    clipped = clip_norm(vector, bound)
    above = torch.nextafter(clipped, clipped.sign() * math.inf).double()
    if dtype == torch.float64:
        assert torch.allclose(clipped, exact, rtol=1e-14, atol=0)
    else:
        assert (clipped.double().abs() <= exact.abs()).all()
        assert (above.abs() > exact.abs()).all()
    assert torch.equal(clipped.sign(), vector.sign())


@pytest.mark.parametrize("bound", [0, -1, float("nan"), float("inf"), "1", None, True])
def test_bad_bounds_are_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="client 2: the clipping bound must be"):
        clip_norm(torch.ones(3), bound, "client 2")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_vectors_are_refused_by_name(value: float) -> None:
    vector = torch.tensor([1.0, value])
    for call in (lambda: clip_norm(vector, 1.0, "client 2"), lambda: l2_norm(vector, "client 2")):
        with pytest.raises(ValueError, match="client 2: 1 of 2 elements are NaN or infinite"):
            call()
    far = torch.ones(100_000)
    far[-1] = far[5] = -value
    with pytest.raises(ValueError, match="client 2: 2 of 100000 elements are NaN or infinite"):
        l2_norm(far, "client 2")
    with pytest.raises(ValueError, match=r"client 2: need a tensor of floats, got torch\.int64"):
        clip_norm(torch.tensor([1, 2]), 1.0, "client 2")


def test_median_by_hand() -> None:
    assert median_norm([3.0, 1.0, 2.0]) == 2.0
    assert median_norm([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert median_norm({8: 3.0, 9: 0.0, 4: 2.0}) == 2.0
    assert median_norm(iter([7.0])) == 7.0


def test_users_that_did_not_move_do_not_stop_a_round() -> None:
    assert median_norm([0.0, 0.0, 0.0, 4.0, 2.0]) == 3.0
    bound = median_norm([0.0, 0.0])
    assert bound == SMALLEST_BOUND > 0
    assert torch.equal(clip_norm(torch.zeros(3), bound), torch.zeros(3))


def test_bad_norms_are_refused_by_user() -> None:
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="the norm of user 12"):
            median_norm({3: 1.0, 12: value})
    with pytest.raises(ValueError, match="the norm of user 1 must be finite"):
        median_norm([1.0, math.inf])
    with pytest.raises(ValueError, match="at least one user"):
        median_norm([])
