"""Shared by the tests of Vectorised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import SIZES

from fedclust.federation.backend import Backend
from fedclust.federation.client import ClientModule


@pytest.fixture
def connect(blobs: Any) -> Callable[..., Backend]:
    def make(backend: Backend, module: ClientModule, sizes: tuple[int, ...] = SIZES, **options: Any) -> Backend:
        data = blobs(sizes, val_fraction=0.0, test_fraction=0.0)
        module.build(data.input_shape, data.n_classes)
        module.initialize(0)
        settings = {"seed": 0, "device": torch.device("cpu"), "precision": "32-true", **options}
        backend.connect(module, data, **settings)
        backend.round = 1
        return backend

    return make
