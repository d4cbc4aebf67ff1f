"""Exact DTW and FastDTW: the published package is the reference, hand values are pinned."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from fastdtw import dtw as reference_dtw
from fastdtw import fastdtw as reference_fastdtw

import fedclust
from fedclust.clustering.distances import dtw, fastdtw
from fedclust.random import numpy_generator

SHORT = [14, 24, 20, 28, 11, 29], [22, 4, 5, 20, 24, 23]
LONG = [10, 36, 42, 58, 50, 21, 34, 11], [10, 56, 18, 5, 42, 37, 50, 41]


def cheapest_path(a: list[int], b: list[int]) -> int:
    """By trying every warping path."""
    if len(a) == len(b) == 1:
        return abs(a[0] - b[0])
    tails = [(a[1:], b), (a, b[1:]), (a[1:], b[1:])]
    return abs(a[0] - b[0]) + min(cheapest_path(x, y) for x, y in tails if x and y)


def draws(count: int, longest: int, seed: int):
    """Pairs of sequences: index sequences, few values (many ties), decimals (ties up to rounding), normal floats."""
    rng = numpy_generator(seed, "sequences")
    for turn in range(count):
        m, n = (int(v) for v in rng.integers(1, longest, 2))
        n = m if turn % 3 == 0 else n
        kind = turn % 4
        if kind == 0:
            yield rng.permutation(300)[:m], rng.permutation(300)[:n]
        elif kind == 1:
            yield rng.integers(0, 4, m), rng.integers(0, 4, n)
        elif kind == 2:
            yield rng.integers(0, 6, m) * 0.1, rng.integers(0, 6, n) * 0.1
        else:
            yield rng.normal(size=m), rng.normal(size=n)


@pytest.mark.parametrize(("pair", "exact", "approximate"), [(SHORT, 51, 53), (LONG, 118, 135)])
def test_pinned_values(pair: tuple[list[int], list[int]], exact: int, approximate: int) -> None:
    assert dtw(*pair) == exact == dtw(*pair[::-1])
    assert fastdtw(*pair) == approximate
    assert fastdtw(*pair, radius=len(pair[0])) == exact


def test_exact_dtw_equals_the_search_over_all_paths() -> None:
    rng = numpy_generator(0, "paths")
    for m, n in product(range(1, 6), repeat=2):
        a, b = rng.integers(-9, 9, m).tolist(), rng.integers(-9, 9, n).tolist()
        assert dtw(a, b) == cheapest_path(a, b)


def test_exact_dtw_equals_the_package() -> None:
    for a, b in draws(300, 60, 1):
        assert dtw(a, b) == reference_dtw(a, b)[0]


@pytest.mark.parametrize("radius", [1, 2, 3, 7])
def test_fastdtw_equals_the_package_and_is_never_below_exact(radius: int) -> None:
    above = 0
    for a, b in draws(300, 70, 2):
        value, exact = fastdtw(a, b, radius), dtw(a, b)
        assert value == reference_fastdtw(a, b, radius=radius)[0]
        assert value >= exact - 1e-9
        above += value > exact + 1e-9
    assert above > 0 or radius == 7


def test_long_index_sequences_equal_the_package() -> None:
    rng = numpy_generator(0, "long")
    a, b = rng.permutation(582_026)[:1455], rng.permutation(582_026)[:1455]
    assert fastdtw(a, b) == reference_fastdtw(a, b)[0]
    assert fastdtw(a[:1001], b) == reference_fastdtw(a[:1001], b)[0]


def test_many_strips_in_every_type_give_one_value() -> None:
    """Lengths beyond one strip of the kernel; values for which 32 bits suffice and for which they do not."""
    rng = numpy_generator(0, "strips")
    a, b = rng.permutation(10**5)[:4001], rng.permutation(10**5)[:3100]
    value = dtw(a, b)
    assert value == dtw(b, a) == dtw(a.astype(float), b.astype(float))
    assert dtw(a * 10**6, b * 10**6) == value * 10**6
    assert dtw(a + 2**61, b + 2**61) == value


@pytest.mark.parametrize("largest", [2**29 - 1, 2**29, 2**30 - 1, 2**30, 2**31, 2**32, 2**60 - 1])
def test_sums_at_the_border_of_a_type_do_not_wrap(largest: int) -> None:
    assert dtw([0, 0], [largest, largest]) == 2 * largest
    assert dtw([0, largest], [largest, 0]) == 2 * largest


def test_integers_of_any_type_are_widened_before_they_are_subtracted() -> None:
    for kind in (np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int32):
        assert dtw(np.array([1], kind), np.array([2], kind)) == 1
        assert fastdtw(np.array([1], kind), np.array([2], kind)) == 1
    assert dtw(np.array([0, 255], np.uint8), np.array([255, 0], np.uint8)) == 510
    assert dtw(torch.tensor([1, 5]), torch.tensor([2, 5], dtype=torch.uint8)) == 1


def test_integers_give_an_int_and_fractions_a_float() -> None:
    assert type(dtw([1, 2], [2, 4])) is int
    assert type(dtw([1, 2], [2.5, 4])) is float
    assert dtw([1, 2], [2.5, 4]) == 3.5


LONG_PAIR = """
import resource
from pathlib import Path

import numpy as np

from fedclust.clustering.distances import dtw, fastdtw

a = np.arange(30_000)
for call in (dtw, fastdtw):
    call(a[:9], a[:9] + 1)  # compiles
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 256 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(dtw(a, a + 1), fastdtw(a, a + 1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is the Linux kernel's")
def test_memory_is_linear_in_the_length() -> None:
    """A matrix of 30,000 × 30,000 would take 900 MB at one byte a cell; 256 MB are left, in a process of its own."""
    root = Path(fedclust.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", LONG_PAIR], capture_output=True, text=True, cwd=root, check=False)
    # Every element but the first and the last meets its equal.
    assert done.stdout == "2 2.0\n", done.stderr


def test_a_long_sequence_against_a_short_one() -> None:
    a = np.arange(100_000)
    assert dtw(a, a[:3] + 1) == reference_fastdtw(a[:50], a[:3] + 1, radius=50)[0] + sum(range(47, 99_997))
    assert fastdtw(a, a) == 0


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([], [], "a is empty"),
        ([1], [], "b is empty"),
        ([1.0, float("nan")], [1.0], "1 of the 2 values of a are NaN"),
        ([1], [float("inf")], "1 of the 1 values of b are NaN or infinite"),
        ([[1, 2]], [1], r"a must have shape \(k,\), got \(1, 2\)"),
        ([True], [1], "a must hold integers or real numbers, got bool"),
        ([1j], [1], "got complex128"),
        (["1"], [1], "a must hold integers or real numbers"),
        (3, [1], "a must be a sequence of numbers, got int"),
        ([2**63], [1], r"within ±2\*\*62"),
        ([-(2**61)], [2**61], r"more than 2\*\*62"),
    ],
)
def test_what_is_no_sequence_is_refused(a: object, b: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dtw(a, b)


@pytest.mark.parametrize("radius", [0, -1, 1.5, True])
def test_a_radius_below_one_is_refused(radius: object) -> None:
    with pytest.raises(ValueError, match="radius must be a whole number of at least 1"):
        fastdtw([1, 2, 3], [1, 2, 3], radius)  # type: ignore[arg-type]


def test_a_huge_radius_is_exact() -> None:
    assert fastdtw(*LONG, radius=2**62) == 118


def test_threads_may_call_it_at_once() -> None:
    rng = numpy_generator(0, "threads")
    rows = rng.permuted(np.tile(np.arange(2000), (8, 1)), axis=1)
    expected = [dtw(rows[0], row) for row in rows]
    found: dict[int, int | float] = {}
    workers = [threading.Thread(target=lambda i=i: found.update({i: dtw(rows[0], rows[i])})) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [found[i] for i in range(8)] == expected


def test_works_where_compiled_code_cannot_be_kept() -> None:
    """No writable directory for numba's cache: compiled in memory."""
    code = (
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from fedclust.clustering.distances import dtw\n"
        "print(dtw([1, 5], [2, 5]))"
    )
    root = Path(fedclust.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.stdout == "1\n", done.stderr
