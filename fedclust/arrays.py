"""Values of users, in whatever kind they come, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def array_of(x: Any) -> NDArray[Any]:
    """An array, tensor or list as an array; bfloat16, which NumPy does not know, as float32."""
    if not isinstance(x, Tensor):
        return np.asarray(x)
    plain = x.detach().cpu()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
