"""The kernels: every decision is the one that whole numbers make, and no buffer's end changes a value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.stats import chi2

from fedclust.privacy.kernels import (
    attempt,
    below,
    combine,
    draw_fractions,
    draw_wholes,
    more_coins,
    settle,
    shuffle_columns,
)

ALL = (1 << 32) - 1


def raw(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def in_bytes(number: int, size: int) -> list[int]:
    return list(number.to_bytes(size, "big"))


def byte_for(drawn: int, bound: int) -> int:
    """A byte that stands for ``drawn`` below ``bound``: the largest one of its share is never refused."""
    return math.ceil((drawn + 1) * 256 / bound) - 1


def fits(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Chi-square; by chance alone it fails once in a million seeds, and the seeds here are fixed."""
    return float(((counts - expected) ** 2 / expected).sum()) < chi2.isf(1e-6, counts.size - 1)


# -- whole numbers below a bound -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 6, 7, 100, 128, 129, 200, 255, 256])
def test_below_takes_equally_many_bytes_for_every_number(bound: int) -> None:
    seen = Counter(int(below(raw(byte), 0, bound)[0]) for byte in range(256) if below(raw(byte), 0, bound)[1] == 1)
    assert seen == dict.fromkeys(range(bound), 256 // bound)
    refused = next((byte for byte in range(256) if below(raw(byte), 0, bound)[1] == -1), None)
    if refused is not None:
        assert below(raw(9, refused, refused, byte_for(bound - 1, bound)), 1, bound) == (bound - 1, 4)


@pytest.mark.parametrize("bound", [257, 300, 65_537, 10**6, 2**31 - 1, 2**31])
def test_below_of_more_takes_four_bytes(bound: int) -> None:
    # Of the words whose product with the bound lies in [j · 2³², (j + 1) · 2³²) the first few may be refused.
    share = (1 << 32) // bound
    for number in (0, 1, bound // 2, bound - 1):
        first, end = -(-(number << 32) // bound), -(-((number + 1) << 32) // bound)
        kept = [below(raw(*in_bytes(word, 4)), 0, bound) for word in (end - share, end - 1)]
        assert kept == [(number, 4), (number, 4)]
        assert end - first in (share, share + 1)
        if end - first > share:
            assert below(raw(*in_bytes(first, 4)), 0, bound) == (0, -1)
    assert below(raw(1, 2, 3), 0, bound)[1] == -1


# -- fractions -----------------------------------------------------------------------------------------------------


def game(u: int, coins: Iterator[tuple[int, int]]) -> tuple[bool, list[int], int]:
    """One attempt on whole numbers: coin k, a (w, r), shows heads if w·k + r < u. And the same as bytes.

    Returns:
        Whether u is kept, the bytes, and u as the kernel gives it.
    """
    top, tail, low_is_out, k = u >> 24, [], False, 0
    firsts = [255, 255, 255]
    while True:
        k += 1
        w, r = next(coins)
        first, other = in_bytes(w, 4)[0], in_bytes(u // k, 4)
        if k <= 3:
            firsts[k - 1] = first
        else:
            tail.append(first)
        if first == other[0]:
            tail += [] if low_is_out else in_bytes(u & 0xFFFFFF, 3)
            low_is_out = True
            same = next((i for i in range(4) if in_bytes(w, 4)[i] != other[i]), 3)
            tail += in_bytes(w, 4)[1 : same + 1]
            tail += [byte_for(r, k)] if w == u // k else []
        if w * k + r >= u:
            return k % 2 == 1, [top, *firsts, *tail], -1 - u if low_is_out else top << 24


def near(u: int, generator: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Coins at and around the point where heads become tails."""
    k = 0
    while True:
        k += 1
        shift = int(generator.choice([0, 0, 0, 1, -1, 256, -256, 1 << 16, -(1 << 16), 1 << 24, -(1 << 24)]))
        w = min(max(u // k + shift, 0), ALL)
        around = [0, k - 1, u % k, u % k - 1, u % k + 1]
        yield w, min(max(int(generator.choice(around)), 0), k - 1)


def test_attempts_decide_as_whole_numbers_do() -> None:
    generator = np.random.default_rng(0)
    kept = ended_late = took_all = 0
    for u in [0, 1, 255, 1 << 24, (1 << 24) - 1, ALL, *generator.integers(0, 1 << 32, 5000).tolist()]:
        keep, data, value = game(u, near(u, generator))
        # Behind the bytes that it needs an attempt wants to see a few more, whatever they are.
        got = attempt(raw(*data, 0, 255, 0, 255), 0, ALL)
        assert got == (int(keep), value, len(data)), (u, data)
        kept, ended_late, took_all = kept + keep, ended_late + (len(data) > 12), took_all + (value < 0)
    assert kept > 500
    assert ended_late > 200
    assert took_all > 3000


@pytest.mark.parametrize("bits", [32, 12, 5, 0])
def test_the_fast_loop_does_what_attempts_do(bits: int) -> None:
    data = random_bytes(60_000)
    mask = ((1 << bits) - 1) << (32 - bits)
    wanted, position = [], 0
    while len(wanted) < 5000:
        kept, value, position = attempt(data, position, mask)
        wanted += [value] if kept else []
    out = np.empty(5000, dtype=np.int64)
    assert draw_fractions(out, 0, data, bits) == (5000, position)
    assert out.tolist() == wanted


def test_fractions_have_their_law() -> None:
    n = 1_000_000
    out = np.empty(n, dtype=np.int64)
    done, used = draw_fractions(out, 0, random_bytes(7 * n), 32)
    assert done == n
    # Attempts of four bytes, 1/(1 − 1/e) of them, and a few more bytes.
    assert 4 < used / n * (1 - math.exp(-1)) < 4.1
    tops = np.where(out < 0, -1 - out, out) >> 24
    edges = np.exp(-np.arange(257) / 256)
    assert fits(np.bincount(tops, minlength=256), n * (edges[:-1] - edges[1:]) / (1 - math.exp(-1)))


# -- whole parts and signs -----------------------------------------------------------------------------------------


def test_a_byte_stands_for_the_coins_up_to_five() -> None:
    # In exact numbers: of 240 bytes 5!/j! − 5!/(j + 1)! halves mean tails at j + 1, two bytes each.
    tails_at = {k: 2 * (math.factorial(5) // math.factorial(k - 1) - math.factorial(5) // math.factorial(k))
                for k in range(2, 6)}  # fmt: skip
    out = np.zeros(1, dtype=np.int64)
    seen: Counter[str] = Counter()
    for byte in range(256):
        done, count, used = draw_wholes(out, 0, 7, raw(byte))
        kind = {(1, 0, 1): "failure", (0, 8, 1): "success", (0, 7, 1): "refused", (0, 7, 0): "more"}[done, count, used]
        if kind == "failure":
            assert out[0] == 2 * 7 + byte % 2
        seen[kind] += 1
    assert seen == {
        "failure": tails_at[2] + tails_at[4],
        "success": tails_at[3] + tails_at[5],
        "refused": 16,
        "more": 2,
    }


def test_coins_from_six_on() -> None:
    # 256 = 42 · 6 + 4 = 36 · 7 + 4: for both the byte 0 is refused.
    refused, heads, tails = 0, 1, 255
    assert more_coins(raw(tails), 0) == (False, 1)
    assert more_coins(raw(9, heads, tails), 1) == (True, 3)
    assert more_coins(raw(refused, heads, refused, tails), 0) == (True, 4)
    assert more_coins(raw(heads, heads, tails), 0) == (False, 3)
    assert more_coins(raw(heads, heads), 0)[1] == -1
    out = np.zeros(1, dtype=np.int64)
    assert draw_wholes(out, 0, 3, raw(1, tails)) == (1, 0, 2)
    assert out[0] == 2 * 3 + 1
    assert draw_wholes(out, 0, 3, raw(1, heads, tails)) == (0, 4, 3)


def test_whole_parts_and_signs_have_their_law() -> None:
    n = 1_000_000
    out = np.empty(n, dtype=np.int64)
    done, _, used = draw_wholes(out, 0, 0, random_bytes(2 * n))
    assert done == n
    assert used / n == pytest.approx(1 / (1 - math.exp(-1)) * (256 + 2.4) / 240, rel=0.01)
    counts = np.bincount(out, minlength=24)
    expected = np.repeat(n * (1 - math.exp(-1)) * np.exp(-np.arange(11)), 2) / 2
    rest = n * math.exp(-11)
    assert fits(np.append(counts[:22], counts[22:].sum()), np.append(expected, rest))


def test_values_are_put_together() -> None:
    fractions = np.array([5 << 24, -1 - 77, 0, 0, 3 << 24])
    wholes = np.array([2 * 3, 2 * 0 + 1, 1, 0, 2 * 1 + 1])
    out = np.zeros(5, dtype=np.int64)
    low = [0, 1, 2, 0, 0, 0, 0, 0, 0, 255, 255, 255]
    # The third is −0.
    assert combine(out, 0, fractions, wholes, 0, raw(*low), 32) == (4, 5, 12)
    assert out.tolist()[:4] == [(3 << 32) + (5 << 24) + 258, -77, 0, -((1 << 32) + (4 << 24) - 1)]
    assert combine(out, 0, fractions, wholes, 0, raw(*low[:5]), 32) == (1, 1, 3)
    # With 8 bits the lower bytes are there but count for nothing.
    assert combine(out, 0, fractions[:1], wholes[:1], 0, raw(*low), 8) == (1, 1, 3)
    assert out[0] == 3 * 256 + 5


# -- ends of buffers -----------------------------------------------------------------------------------------------


def test_a_kernel_that_runs_out_starts_its_draw_again_on_the_same_bytes() -> None:
    data = random_bytes(4000)
    whole, parts = np.empty((2, 300), dtype=np.int64)
    assert draw_fractions(whole, 0, data, 32)[0] == 300
    done = start = 0
    for end in range(len(data)):
        done, used = draw_fractions(parts, done, data[start:end], 32)
        start += used
    assert done == 300
    assert (whole == parts).all()
    assert draw_wholes(whole, 0, 0, data)[0] == 300
    done = start = count = 0
    for end in range(len(data)):
        done, count, used = draw_wholes(parts, done, count, data[start:end])
        start += used
    assert done == 300
    assert (whole == parts).all()


def test_a_coin_that_runs_out_says_so() -> None:
    assert settle(raw(1, 2), 0, 1 << 31, 3)[1] == -1
    whole = in_bytes((1 << 31) // 3, 4)
    assert settle(raw(*whole[1:]), 0, 1 << 31, 3)[1] == -1
    assert settle(raw(*whole[1:], 255), 0, 1 << 31, 3) == (False, 4)


def test_a_shuffle_goes_on_where_it_stopped() -> None:
    data = random_bytes(4000)
    first = np.arange(5 * 30).reshape(5, 30)
    second = first.copy()
    rows = np.array([0, 1, 3, 4])
    assert shuffle_columns(first, rows, 0, 3, data)[0] == 30
    column, last, start = 0, 3, 0
    for end in range(len(data)):
        column, last, used = shuffle_columns(second, rows, column, last, data[start:end])
        start += used
    assert column == 30
    assert (first == second).all()
