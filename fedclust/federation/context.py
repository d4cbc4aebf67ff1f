"""What a piece of local work may use: its generators, its device and precision, and (on a client) its own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision

from fedclust.allocator import keep_freed_memory
from fedclust.checks import choice
from fedclust.data.tables import SPLITS, ClientData, Table
from fedclust.federation.message import Message, Value
from fedclust.random import seed_for, torch_generator

if TYPE_CHECKING:
    from fedclust.federation.client import ClientModule
    from fedclust.federation.local import LocalFit, LocalWork

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def make_fabric(device: torch.device, precision: str) -> Fabric:
    """A Fabric for one device: mixed precision and loss scaling for local loops.

    The first one for a CPU also tells the process to keep freed memory (`fedclust.allocator`).

    Args:
        device: Where the work runs.
        precision: One of "32-true", "bf16-mixed", "16-mixed".

    Raises:
        ValueError: If the precision is another one.
    """
    check_precision(precision, "in federated rounds", "weights are exchanged and averaged in float32")
    # Loss scaling has a memory, which must not pass from one client to the next: on a GPU 16-mixed gets a Fabric of its
    # own every time. All others are kept, since making one takes milliseconds.
    if precision == "16-mixed" and device.type != "cpu":
        return _new_fabric(device, precision)
    return _kept_fabric(device, precision)


def check_precision(precision: str, where: str, why: str) -> None:
    """Refuses a precision in which weights or rows would not be float32.

    Raises:
        ValueError: If the precision is none of `PRECISIONS`, saying where it cannot be used and why.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} cannot be used {where}; allowed: {', '.join(PRECISIONS)} ({why})")


def emulated(device: torch.device, precision: str) -> bool:
    """Whether a precision is only emulated on a device: PyTorch then multiplies many times slower than in float32."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return precision != "32-true" and device.type == "cpu" and supported is not None and not supported()


@lru_cache(maxsize=16)
def _kept_fabric(device: torch.device, precision: str) -> Fabric:
    if device.type == "cpu":
        keep_freed_memory()
    return _new_fabric(device, precision)


def _new_fabric(device: torch.device, precision: str) -> Fabric:
    # Half precision on a CPU is bfloat16, as in the Trainer. The plugin is made here because Fabric announces the ones
    # that it makes itself, once for every client and round.
    mixed: Any = "bf16-mixed" if device.type == "cpu" else precision
    plugins = None if precision == "32-true" else MixedPrecision(mixed, device.type)
    if device.type == "cpu":
        return Fabric(accelerator="cpu", devices=1, plugins=plugins)
    return Fabric(accelerator=device.type, devices=[device.index or 0], plugins=plugins)


@dataclass
class WorkContext:
    """What local work on the server or on a client may use.

    Attributes:
        who: Name for messages, such as "client 3" or "server".
        round: The round; 0 is the work before the first round.
        seed: The run's seed.
        fabric: Device, precision and loss scaling.
    """

    who: str
    round: int
    seed: int
    fabric: Fabric

    @property
    def device(self) -> torch.device:
        """Where tensors of this work live."""
        return self.fabric.device

    @property
    def precision(self) -> str:
        """Lightning's name of the precision, such as "bf16-mixed"."""
        return str(self.fabric.strategy.precision.precision)

    def rng(self, purpose: str) -> torch.Generator:
        """A fresh CPU generator for (seed, round, who, purpose); equal calls give equal draws."""
        return torch_generator(self.seed, self.round, self.who, purpose)

    def seed_for(self, purpose: str) -> int:
        """An integer seed for (seed, round, who, purpose), below 2**32, for libraries that want one."""
        return seed_for(self.seed, self.round, self.who, purpose) % 2**32


@dataclass
class ClientContext(WorkContext):
    """All that an action of one client sees.

    Attributes:
        id: Client id, 0..N-1.
        data: The client's own train, val and test rows.
        state: The client's own memory between rounds; message types only. Changes are kept if the action succeeds.
        vault: The client's secrets, such as mask keys: kept in memory like the state, but in no checkpoint or file.
        together: Does a local fit together with those of other clients; None trains this client by itself.
    """

    id: int = -1
    data: ClientData = field(kw_only=True)
    state: Message = field(default_factory=dict)
    vault: Message = field(default_factory=dict)
    together: Callable[[ClientModule, ClientContext, LocalWork], LocalFit] | None = None

    def table(self, message: Mapping[str, Value]) -> Table:
        """The client's rows of the split that a message names under "split".

        Raises:
            ValueError: If it is not "train", "val" or "test".
        """
        table: Table = getattr(self.data, choice("split", message["split"], SPLITS))
        return table
