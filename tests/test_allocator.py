"""Freed memory stays with the process, unless the environment says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from fedclust.allocator import _VARIABLES

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator has this setting")

# Local steps of an autoencoder; prints page faults per step.
_STEPS = """
import resource, sys
import torch
from torch import nn
from fedclust.federation.context import make_fabric
if sys.argv[1] == "fabric":
    make_fabric(torch.device("cpu"), "32-true")
torch.set_num_threads(1)
widths = [784, 512, 256, 512, 784]
network = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:])))
optimizer = torch.optim.Adam(network.parameters())
x = torch.rand(256, 784)
def step():
    optimizer.zero_grad()
    nn.functional.mse_loss(network(x), x).backward()
    optimizer.step()
for _ in range(40):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


def faults(how: str, **variables: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name not in _VARIABLES} | variables
    command = [sys.executable, "-c", _STEPS, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout)


@glibc
def test_a_process_that_trains_keeps_the_memory_of_a_step() -> None:
    assert faults("fabric") < faults("plain") / 4


@glibc
def test_a_setting_of_the_environment_is_left_as_it_is() -> None:
    assert faults("fabric", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 100
