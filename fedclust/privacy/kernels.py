"""Kernels that turn a source's bytes into noise and permutations, exactly: integers are compared, nothing is rounded.

Every result is a function of the source's stream alone, wherever a buffer of bytes ends. A kernel that runs out of
bytes says where its first unfinished draw began; :class:`fedclust.privacy.randomness.Supply` puts fresh bytes behind
those from there on, and the draw starts again on the same bytes, so that it goes as if they had never been apart. To
start it on other bytes would be wrong: long draws would be cut off more often than short ones, and the values that need
them would become rarer. No byte of a finished draw is read again.

The kernels are in one file because numba renews a compiled kernel on disk when that kernel's own file changes, and not
when the file of another one that it calls does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedclust.jit import jit

Array = Any
_RAN_OUT = -1  # in place of the position behind a draw


@jit
def below(raw: Array, position: int, bound: int) -> tuple[Any, int]:
    """An integer from 0 to ``bound`` − 1, each exactly equally likely, and the position behind its bytes.

    It reads one byte where that can do, else four. Method: D. Lemire, Fast random integer generation in an interval,
    2019: of the products that share their high part, those whose low part is below size mod bound are refused, which
    leaves ⌊size / bound⌋ for each high part.

    Args:
        raw: Bytes.
        position: Of the first one to read.
        bound: 1 to 2³¹.
    """
    width = 1 if bound <= 256 else 4
    size = 1 << (8 * width)
    while position + width <= raw.size:
        drawn = np.int64(raw[position])
        for i in range(1, width):
            drawn = drawn << 8 | np.int64(raw[position + i])
        position += width
        product = drawn * bound
        if product & (size - 1) >= size % bound:
            return product >> (8 * width), position
    return 0, _RAN_OUT


@jit
def low_bytes(raw: Array, position: int) -> Any:
    """Three bytes as a number."""
    return np.int64(raw[position]) << 16 | np.int64(raw[position + 1]) << 8 | np.int64(raw[position + 2])


@jit
def settle(raw: Array, position: int, numerator: int, k: int) -> tuple[Any, int]:
    """A coin with P(heads) = ``numerator`` / (k · 2³²) whose first byte did not decide, and the position behind it.

    The coin is a uniform x = w·k + r below k · 2³², of w below 2³² and r below k: heads if x < ``numerator``. With
    ``numerator`` = q·k + s this means w < q, or w = q and r < s. Bytes of w are read from the highest on until one
    differs from that of q; the first one did not.
    """
    if position + 3 > raw.size:
        return False, _RAN_OUT
    whole = numerator // k
    for shift in (16, 8, 0):
        byte, other = np.int64(raw[position]), (whole >> shift) & 255
        position += 1
        if byte != other:
            return byte < other, position
    drawn, position = below(raw, position, k)
    return drawn < numerator % k, position


@jit
def attempt(raw: Array, start: int, mask: int) -> tuple[int, Any, int]:
    """One attempt of :func:`draw_fractions`, coin by coin.

    Args:
        raw: Bytes.
        start: Position of its first byte; four of them are there.
        mask: The bits that u may have.

    Returns:
        1 if it is kept, else 0; u as in :func:`draw_fractions`; the position behind.
    """
    top = np.int64(raw[start]) & (mask >> 24)
    position = start + 4
    low = np.int64(-1)
    k = 1
    while position + 4 <= raw.size:
        if k <= 3:
            byte = np.int64(raw[start + k])
        else:
            byte = np.int64(raw[position])
            position += 1
        heads = (byte + 1) * k <= top
        if not heads and byte * k <= top:
            if low < 0:
                low = low_bytes(raw, position) & mask
                position += 3
            heads, position = settle(raw, position, top << 24 | low, k)
            if position == _RAN_OUT:
                break
        if not heads:
            return k & 1, (top << 24 if low < 0 else -1 - (top << 24 | low)), position
        k += 1
    return 0, 0, _RAN_OUT


@jit
def draw_fractions(out: Array, done: int, raw: Array, bits: int) -> tuple[int, int]:
    """Fills ``out`` from ``done`` on with u in [0, 2³²), multiples of 2^(32 − bits), P(u) ∝ exp(−u / 2³²).

    A uniform u is kept with probability exp(−γ), γ = u / 2³²: let k be the first of 1, 2, … at which a coin with
    P(heads) = γ/k shows tails. P(k > j) = γʲ/j!, hence P(k odd) = exp(−γ). (Canonne, Kamath, Steinke 2020, Algorithm 1)

    Of u only the highest byte is drawn at first. An attempt begins with that byte and the first bytes of the coins 1
    to 3, used or not: with byte b and highest byte t the coin k shows heads if (b + 1)·k <= t, tails if b·k > t, and
    else takes more bytes of both, see :func:`settle`. :func:`attempt` does this for any number of coins, and the loop
    here without branches for the nineteen in twenty attempts that need nothing more.

    Args:
        out: (n,) int64, for u with its three lower bytes still 0, or −1 − u if a coin took them.
        done: How many are there.
        raw: Bytes.
        bits: 0 to 32.

    Returns:
        How many are there now, and how many bytes are used up.
    """
    mask = ((1 << bits) - 1) << (32 - bits)
    position = 0
    while done < out.size and position + 4 <= raw.size:
        top = np.int64(raw[position]) & (mask >> 24)
        one, two, three = np.int64(raw[position + 1]), np.int64(raw[position + 2]), np.int64(raw[position + 3])
        first, second = one + 1 <= top, 2 * two + 2 <= top
        open_first, open_second = one == top, (not second) & (2 * two <= top)
        if open_first | (first & (open_second | (second & (3 * three <= top)))):
            kept, u, after = attempt(raw, position, mask)
            if after == _RAN_OUT:
                break
            out[done] = u
            done += kept
            position = after
        else:
            out[done] = top << 24
            done += int((not first) | second)
            position += 4
    return done, position


@jit
def more_coins(raw: Array, position: int) -> tuple[bool, int]:
    """Whether the first of the coins 6, 7, … that shows tails is odd, and the position behind its bytes."""
    k, drawn = 5, 0
    while drawn == 0:
        k += 1
        drawn, position = below(raw, position, k)
        if position == _RAN_OUT:
            return False, _RAN_OUT
    return k & 1 == 1, position


@jit
def draw_wholes(out: Array, done: int, count: int, raw: Array) -> tuple[int, int, int]:
    """Fills ``out`` from ``done`` on with 2·v + a random bit, P(v) ∝ exp(−v).

    v counts the successes, of probability exp(−1) each, before the first failure. As in :func:`draw_fractions`, now
    with γ = 1, success means that the first coin to show tails is odd. A byte below 240 = 2 · 5! stands for the coins
    1 to 5: half of it, x, is uniform below 5!, and they show heads up to j if x < 5!/j!. So x from 60 on means tails
    at 2, from 20 on at 3, from 5 on at 4, from 1 on at 5; 0 leaves it to the coins from 6 on. Whether the last byte is
    odd depends on none of this: that is the bit.

    Args:
        out: (n,) int64.
        done: How many are there.
        count: Successes of the next one so far.
        raw: Bytes.

    Returns:
        ``done`` and ``count`` now, and how many bytes are used up.
    """
    position = 0
    while done < out.size and position < raw.size:
        byte = np.int64(raw[position])
        if byte >= 240:
            position += 1
            continue
        success = ((byte >= 40) & (byte < 120)) | (byte < 10)
        after = position + 1
        if byte < 2:
            success, after = more_coins(raw, after)
            if after == _RAN_OUT:
                break
        position = after
        out[done] = 2 * count + (byte & 1)
        done += not success
        count = count + 1 if success else 0
    return done, count, position


@jit
def combine(
    out: Array, done: int, fractions: Array, wholes: Array, taken: int, raw: Array, bits: int
) -> tuple[int, int, int]:
    """Fills ``out`` from ``done`` on with ±(u + v · 2^bits), and leaves out −0.

    So a value has the discrete Laplace law with 2^bits steps. (Canonne, Kamath, Steinke 2020, Algorithm 2. If −0
    counted too, 0 would be twice as likely as it should be.)

    Args:
        out: int64.
        done: How many are there.
        fractions: (n,) from :func:`draw_fractions`; u is theirs over 2^(32 − bits).
        wholes: (n,) v and sign, from :func:`draw_wholes`.
        taken: How many of both are used up.
        raw: Bytes, for the lower bytes of u.
        bits: 0 to 32.

    Returns:
        ``done`` and ``taken`` now, and how many bytes are used up.
    """
    position = 0
    while taken < fractions.size and position + 3 <= raw.size:
        u = fractions[taken]
        if u < 0:
            u = -1 - u
        else:
            u |= low_bytes(raw, position)
            position += 3
        size, negative = (wholes[taken] >> 1) << bits | u >> (32 - bits), wholes[taken] & 1
        out[done] = -size if negative else size
        done += (size != 0) | (negative == 0)
        taken += 1
    return done, taken, position


@jit
def shuffle_columns(work: Array, rows: Array, column: int, last: int, raw: Array) -> tuple[int, int, int]:
    """Permutes each column's values in ``rows``, in place: Fisher and Yates' shuffle from the last row to the second.

    Args:
        work: (users, d) integers.
        rows: (n,) int64, the rows that are shuffled among themselves.
        column: The first column that is not finished.
        last: Which of ``rows`` is next there: n − 1 in a new column.
        raw: Bytes.

    Returns:
        ``column`` and ``last`` now, and how many bytes are used up.
    """
    position = 0
    while column < work.shape[1]:
        while last > 0:
            other, after = below(raw, position, last + 1)
            if after == _RAN_OUT:
                return column, last, position
            position = after
            kept = work[rows[last], column]
            work[rows[last], column] = work[rows[other], column]
            work[rows[other], column] = kept
            last -= 1
        column += 1
        last = rows.size - 1
    return column, last, position
