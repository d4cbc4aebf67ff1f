"""Numbers as whole multiples of a step, modulo a power of two, so that sums of them are exact and cannot overflow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedclust.checks import positive, positive_int

# Whole numbers up to here are exact in float64.
_FLOAT_BITS = 53


@dataclass(frozen=True)
class FixedPoint:
    """Fixed-point numbers for the sum of a known number of bounded vectors.

    A value x becomes round(x / step), so it moves by at most half a step, and a sum of n values by at most n/2 steps.
    Multiples of the step, hence whole numbers where the step is at most 1, are exact.

    Attributes:
        exponent: The step is 2 to this power.
        largest: Largest whole number that one value can become.
        bits: Of the ring: 32 or 64.
    """

    exponent: int
    largest: int
    bits: int

    @classmethod
    def for_sum(cls, clients: int, bound: float, bits: int = 64) -> FixedPoint:
        """The finest step at which ``clients`` values within ±``bound`` add up without overflow.

        Args:
            clients: How many vectors are added at most.
            bound: Largest absolute value of an element, between 2⁻⁹⁰⁰ and 2⁹⁰⁰.
            bits: 64 (sums of up to 2⁵³ steps, all that float64 holds) or 32 (up to 2³¹ − 1 steps, half the bytes).

        Raises:
            ValueError: for values out of range, or too many clients for the ring.
        """
        clients, bound = positive_int("clients", clients), positive("bound", bound)
        if not 2.0**-900 <= bound <= 2.0**900:
            raise ValueError(f"bound must lie between 2**-900 and 2**900, got {bound!r}")
        if bits not in (32, 64):
            raise ValueError(f"bits must be 32 or 64, got {bits!r}")
        most = min(2 ** (bits - 1) - 1, 2**_FLOAT_BITS) // clients
        if most < 1:
            raise ValueError(f"{clients} clients are too many for {bits} bits")
        exponent = math.frexp(bound)[1] - most.bit_length()
        while math.ceil(math.ldexp(bound, -exponent)) > most:
            exponent += 1
        return cls(exponent, math.ceil(math.ldexp(bound, -exponent)), bits)

    @property
    def step(self) -> float:
        """Distance of neighbouring numbers."""
        return math.ldexp(1.0, self.exponent)

    @property
    def dtype(self) -> np.dtype:
        """Of the ring's elements."""
        return np.dtype(f"uint{self.bits}")

    def encode(self, vector: np.ndarray) -> np.ndarray:
        """Float64 values within the bound as elements of the ring, of the same shape."""
        return np.rint(np.ldexp(vector, -self.exponent)).astype(np.int64).astype(self.dtype)

    def decode(self, total: np.ndarray, count: int) -> np.ndarray:
        """The sum of ``count`` encoded vectors as float64, without further rounding.

        Raises:
            ValueError: If an element is larger than such a sum can be, as when masks did not cancel.
        """
        whole = total.view(np.dtype(f"int{self.bits}")).astype(np.int64)
        outside = int(np.count_nonzero((whole > count * self.largest) | (whole < -count * self.largest)))
        if outside:
            raise ValueError(f"{outside} of {whole.size} elements of the sum exceed {count} times the bound: refused")
        return np.ldexp(whole.astype(np.float64), self.exponent)
