"""A toy method whose numbers are known by hand; in a module of its own, so that worker processes can import it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedclust.federation.algorithm import Algorithm, Metrics, Server, State
from fedclust.federation.client import ClientModule, action
from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message
from fedclust.federation.padding import mask_of, mean_over_rows


class ToyClient(ClientModule):
    """One parameter `w` (d,) fitted to the mean of the client's rows; remembers in which rounds it was asked."""

    draws_in_training = False
    honours_row_masks = True

    def build(self, input_shape: tuple[int, ...], n_classes: int | None) -> None:
        if not hasattr(self, "w"):
            self.w = nn.Parameter(torch.zeros(input_shape))

    def initialize(self, seed: int) -> None:
        with torch.no_grad():
            self.w.zero_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.25)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mean_over_rows((self.w - batch["x"]).square().sum(1), mask_of(batch, "x"))

    @action
    def pull(self, message: Message, ctx: ClientContext) -> Message:
        """One gradient step from the given w; keeps the list of rounds in the state."""
        self.load_exchanged({"w": torch.as_tensor(message["w"])})
        fit = self.fit_locally(ctx, 1, batches=lambda epoch: [{"x": ctx.data.train.x}])
        seen = torch.as_tensor(ctx.state.get("rounds", torch.zeros(0, dtype=torch.int64)))
        ctx.state["rounds"] = torch.cat([seen, torch.tensor([ctx.round])])
        return {"w": self.exchanged()["w"], "n_rows": len(ctx.data.train), "n_steps": fit.n_steps}

    @action
    def recall(self, message: Message, ctx: ClientContext) -> Message:
        """The rounds that the state remembers, and the client's own number."""
        return {"rounds": ctx.state.get("rounds", torch.zeros(0, dtype=torch.int64)), "me": ctx.id}

    @action
    def spoil(self, message: Message, ctx: ClientContext) -> Message:
        """Changes its state in place and by name, then fails at the clients in `fail`."""
        torch.as_tensor(ctx.state["rounds"]).zero_()
        ctx.state["extra"] = 1
        if ctx.id in torch.as_tensor(message["fail"]).tolist():
            raise ZeroDivisionError(f"no luck for {ctx.id}")
        return {"ok": True}

    @action
    def personalise(self, message: Message, ctx: ClientContext) -> Message:
        """Trains inside an evaluation and returns the loss."""
        fit = self.fit_locally(ctx, 1, batches=lambda epoch: [{"x": ctx.data.train.x}])
        return {"loss": fit.terms["loss"]}

    @action
    def echo(self, message: Message, ctx: ClientContext) -> Message:
        """What `recall` says too."""
        return self.recall(message, ctx)

    @action
    def threads(self, message: Message, ctx: ClientContext) -> Message:
        """torch's threads where the client works."""
        return {"threads": torch.get_num_threads()}

    @action
    def all_threads(self, message: Message, ctx: ClientContext) -> Message:
        """Threads of every library where the client works."""
        import numba
        from threadpoolctl import threadpool_info

        pools = {int(pool["num_threads"]) for pool in threadpool_info()}
        return {
            "pools": torch.tensor(sorted(pools)),
            "torch": torch.get_num_threads(),
            "numba": numba.get_num_threads(),
        }

    @action
    def whisper(self, message: Message, ctx: ClientContext) -> Message:
        """Counts in the vault how often it was asked; client 1 fails where told to."""
        known = ctx.vault.get("key", 0)
        assert isinstance(known, int)
        ctx.vault["key"] = known + 1
        if message["fail"] and ctx.id == 1:
            raise OSError("away")
        return {"known": known}

    @action
    def die(self, message: Message, ctx: ClientContext) -> Message:
        """Kills the process that the client works in, as long as the file `once` is not there (then never again)."""
        if ctx.id == message["victim"]:
            path = Path(str(message["once"]))
            if not path.exists() or message["always"]:
                path.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return {"pid": os.getpid()}

    @action
    def bulky(self, message: Message, ctx: ClientContext) -> Message:
        """Gives back as many bytes as it gets, and keeps as many in state and vault."""
        blob = message["blob"]
        assert isinstance(blob, bytes)
        ctx.state["kept"], ctx.vault["kept"] = blob, blob
        if message.get("fail"):
            raise ValueError("long " * (len(blob) // 5))
        return {"blob": blob[::-1], "text": "x" * len(blob)}

    @action
    def odd_reply(self, message: Message, ctx: ClientContext) -> Message:
        return {"nested": {"a": 1}}  # type: ignore[dict-item]


@dataclass
class ToyState(State):
    w: Tensor


class ToyAlgorithm(Algorithm):
    """Plain average of the clients' w."""

    state_class: ClassVar[type[State]] = ToyState
    default_monitor: ClassVar[tuple[str, str]] = ("val/loss", "min")

    def start(self, server: Server) -> ToyState:
        return ToyState(server.module.snapshot()["w"])

    def round(self, state: State, cohort: list[int], server: Server) -> tuple[ToyState, Metrics]:
        assert isinstance(state, ToyState)
        replies = server.ask("pull", cohort, shared={"w": state.w})
        return ToyState(torch.stack([torch.as_tensor(r["w"]) for r in replies.values()]).mean(0)), {"train/asked": 1.0}

    def evaluate(self, state: State, server: Server, split: str) -> Metrics:
        replies = server.ask("personalise", server.clients)
        return {"loss": sum(float(reply["loss"]) for reply in replies.values())}  # type: ignore[arg-type]

    def assign(self, state: State, server: Server, client: int, split: str) -> Message:
        return {}

    @classmethod
    def module_for(cls, state: State, module: ClientModule) -> ClientModule:
        return module
