"""Shares of a secret: polynomials by hand, any t shares, no t − 1 shares, wrong shares."""

from __future__ import annotations

import secrets
from itertools import combinations

import pytest

from fedclust.privacy import shamir
from fedclust.privacy.shamir import PRIME, SHARE_BYTES, evaluate, recover_secret, split_secret, weights_at_zero


def as_secret(number: int) -> bytes:
    return number.to_bytes(32, "big")


def as_share(number: int) -> bytes:
    return (number % PRIME).to_bytes(SHARE_BYTES, "big")


def is_probable_prime(number: int) -> bool:
    """Miller and Rabin's test with the first 20 primes as bases."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71):
        powers = [pow(base, odd * 2**i, number) for i in range(twos)]
        if powers[0] != 1 and number - 1 not in powers:
            return False
    return True


def test_the_field_is_one_and_holds_every_secret() -> None:
    assert PRIME > 2**256
    assert is_probable_prime(PRIME)
    assert not any(is_probable_prime(number) for number in range(2**256 + 1, PRIME, 2))
    assert (PRIME - 1).bit_length() <= 8 * SHARE_BYTES


def test_a_polynomial_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2x² + 3x + 5: 10, 19, 32, 49.
    drawn = {PRIME: iter([2, 3])}
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda below: next(drawn[below]))
    shares = split_secret(as_secret(5), 3, 4)
    assert shares == [as_share(value) for value in (10, 19, 32, 49)]
    assert evaluate([2, 3, 5], 10) == 235
    assert evaluate([1, 0], PRIME - 1) == PRIME - 1
    for length in (15, 16, 17, 40):
        coefficients = [PRIME - 1 - power for power in range(length)]
        by_powers = sum(one * pow(99, length - 1 - at, PRIME) for at, one in enumerate(coefficients)) % PRIME
        assert evaluate(coefficients, 99) == by_powers


def test_weights_by_hand() -> None:
    # f(0) = 3·f(1) − 3·f(2) + f(3) for every quadratic f.
    assert weights_at_zero((1, 2, 3)) == (3, PRIME - 3, 1)
    assert weights_at_zero((7,)) == (1,)
    # f(0) = 2·f(1) − f(2) for every line.
    assert weights_at_zero((1, 2)) == (2, PRIME - 1)


@pytest.mark.parametrize(("threshold", "count"), [(1, 1), (1, 3), (2, 2), (3, 5), (5, 5)])
@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, secrets.token_bytes(32)], ids=["0", "largest", "random"])
def test_any_threshold_of_shares_gives_the_secret_back(threshold: int, count: int, secret: bytes) -> None:
    shares = split_secret(secret, threshold, count)
    assert {len(share) for share in shares} == {SHARE_BYTES}
    for size in range(threshold, count + 1):
        for points in combinations(range(1, count + 1), size):
            assert recover_secret({point: shares[point - 1] for point in points}, threshold) == secret


def test_fewer_shares_fit_every_secret() -> None:
    # Two shares of a threshold of three, with the right third share for any secret one likes.
    shares = split_secret(as_secret(42), 3, 3)
    for wanted in (0, 7, 2**256 - 1):
        one, two = (int.from_bytes(share, "big") for share in shares[:2])
        third = wanted - 3 * one + 3 * two
        assert recover_secret({1: shares[0], 2: shares[1], 3: as_share(third)}, 3) == as_secret(wanted)


def test_too_few_shares_are_refused() -> None:
    shares = split_secret(as_secret(42), 3, 4)
    with pytest.raises(ValueError, match="2 of 3 needed shares"):
        recover_secret({1: shares[0], 4: shares[3]}, 3)


def test_two_splits_share_nothing() -> None:
    first, second = split_secret(as_secret(42), 2, 3), split_secret(as_secret(42), 2, 3)
    assert not set(first) & set(second)


def test_shares_of_no_secret_are_refused() -> None:
    with pytest.raises(ValueError, match="do not belong to one secret"):
        recover_secret({1: as_share(PRIME - 1)}, 1)
    with pytest.raises(ValueError, match="share 2 has 32 bytes"):
        recover_secret({1: as_share(1), 2: bytes(32)}, 2)


@pytest.mark.parametrize(
    ("secret", "threshold", "count", "error"),
    [
        (bytes(31), 1, 1, "32 bytes, got 31"),
        (bytes(33), 1, 1, "32 bytes, got 33"),
        (bytes(32), 4, 3, "at most 3"),
        (bytes(32), 0, 3, "at least 1, got 0"),
        (bytes(32), 1.5, 3, "at least 1, got 1.5"),
    ],
)
def test_bad_arguments_are_refused(secret: bytes, threshold: int, count: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        split_secret(secret, threshold, count)
