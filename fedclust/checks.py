"""Checks of single arguments, with messages that name the argument, the value and what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any


def positive_int(name: str, value: Any, *, least: int = 1) -> int:
    """`value` as an int of at least `least`; booleans, floats and strings are refused.

    Raises:
        ValueError: If the value is of another type or too small.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def real_number(name: str, value: Any) -> float:
    """`value` as a float; booleans, strings and NaN are refused, infinity is the caller's to judge.

    Raises:
        ValueError: If the value is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def unit(name: str, value: Any) -> float:
    """`value` as a float in [0, 1].

    Raises:
        ValueError: If the value is no number in that range.
    """
    number = real_number(name, value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value!r}")
    return number


def fraction(name: str, value: Any) -> float:
    """`value` as a share in [0, 1).

    Raises:
        ValueError: If the value is no number in that range.
    """
    share = real_number(name, value)
    if not 0.0 <= share < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
    return share


def non_negative(name: str, value: Any) -> float:
    """`value` as a finite float of at least 0.

    Raises:
        ValueError: If the value is no such number.
    """
    number = real_number(name, value)
    if math.isinf(number) or number < 0:
        raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
    return number


def positive(name: str, value: Any) -> float:
    """`value` as a finite float above 0.

    Raises:
        ValueError: If the value is no such number.
    """
    number = non_negative(name, value)
    if number == 0:
        raise ValueError(f"{name} must be above 0, got {value!r}")
    return number


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """`value` as one of the `allowed` names.

    Raises:
        ValueError: If the value is another one.
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return str(value)


def true_or_false(name: str, value: Any) -> bool:
    """`value` if it is True or False.

    Raises:
        ValueError: For anything else: 0, "false" or None may mean either.
    """
    if isinstance(value, bool):
        return value
    raise ValueError(f"{name} must be true or false, got {value!r}")


def seed_value(name: str, value: Any) -> int:
    """`value` as a seed, 0 or above; 0 is a seed like any other, booleans are refused.

    Raises:
        ValueError: If the value is no whole number of at least 0.
    """
    return positive_int(name, value, least=0)
