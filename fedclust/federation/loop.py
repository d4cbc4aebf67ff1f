"""The federated loop: one epoch of Lightning's Trainer is one round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch

from fedclust.data.loading import Steps
from fedclust.data.tables import SPLITS
from fedclust.federation import checkpoint
from fedclust.federation.algorithm import Algorithm, Metrics, Server, State
from fedclust.federation.backend import Backend, InProcess
from fedclust.federation.client import ClientModule
from fedclust.federation.cohort import Cohorts, Rounds
from fedclust.federation.context import WorkContext, emulated, make_fabric
from fedclust.federation.refusals import check_actions, check_monitors, refuse_unusable_flags

ROUND_METRICS = frozenset({"clients/asked", "clients/failed", "bytes/up", "bytes/down", "seconds/round"})


class FederatedLoop(pl.LightningModule):
    """Runs a federated algorithm under a Trainer: `max_epochs` is the number of rounds.

    Args:
        algorithm: The server side of the method.
        client: The client side; one resident module per worker.
        backend: Carries the messages; default `InProcess()`.
        cohort_size: Clients per round; None takes all, or `participation`.
        participation: Share of the clients per round in (0, 1], rounded, at least one client; None takes all.

    Raises:
        ValueError: If both cohort arguments are given, or one is out of range.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        client: ClientModule,
        backend: Backend | None = None,
        cohort_size: int | None = None,
        participation: float | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.algorithm = algorithm
        self.client = client
        self.backend = backend or InProcess()
        self.cohorts = Cohorts(cohort_size, participation)
        self.resolved_seed = 0
        self.latest: Metrics = {}
        self.report_progress: Callable[[str], None] = lambda text: None
        self._state: State | None = None
        self._server: Server | None = None

    # -- what reports read --------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The algorithm's state.

        Raises:
            RuntimeError: Before `fit` or without a checkpoint.
        """
        if self._state is None:
            raise RuntimeError("nothing was trained yet: run fit first, or give the checkpoint with --ckpt_path")
        return self._state

    @property
    def server(self) -> Server:
        """The server; exists from the Trainer's setup on."""
        if self._server is None:
            raise RuntimeError("the federated loop has not been set up by a Trainer yet")
        return self._server

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per stage so far."""
        return self.server.seconds

    @property
    def notes(self) -> list[str]:
        """Sentences that belong into the result."""
        return self.server.notes

    def byte_counts(self) -> dict[str, dict[str, int]]:
        """Bytes so far: {action: {"up": …, "down": …}}."""
        return self.backend.traffic.counts()

    def client_rows(self) -> list[dict[str, Any]]:
        """One row per client: sizes, planted group and cluster where known, and what its replies reported."""
        clusters = {} if self._state is None else self.algorithm.assignments(self._state) or {}
        planted = self.server.planted or {}
        rows = []
        for client in range(self.backend.data.n_clients):
            data = self.backend.data.client(client)
            sizes = {split: len(getattr(data, split)) for split in SPLITS}
            groups = {
                name: known[client] for name, known in (("group", planted), ("cluster", clusters)) if client in known
            }
            rows.append({"client": client, **sizes, **groups, **self.server.client_values.get(client, {})})
        return rows

    def tables(self) -> dict[str, list[dict[str, float]]]:
        """Tables of the method's own, by name; none before there is a state."""
        return {} if self._state is None else self.algorithm.tables(self._state)

    # -- setting up ---------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Any]:
        """Adds none; this is the first hook of a run, so flags that cannot work are refused here."""
        refuse_unusable_flags(self.trainer)
        return []

    def configure_optimizers(self) -> None:
        """None: optimisers live inside the clients' local loops."""

    def setup(self, stage: str) -> None:
        """Connects the backend to the data and checks everything that can be checked before training."""
        data = getattr(self.trainer, "datamodule", None)
        if data is None or not hasattr(data, "client"):
            raise TypeError("a FederatedLoop needs a fedclust.FederatedDataModule: trainer.fit(loop, datamodule=data)")
        device = self.trainer.strategy.root_device
        precision = str(self.trainer.precision)
        fabric = make_fabric(device, precision)
        quick = bool(getattr(self.trainer, "fast_dev_run", False))
        # A fit from a checkpoint, or by the same Trainer with more rounds granted, goes on; any other one starts
        # afresh, whatever the loop did before.
        fresh = stage == "fit" and self.trainer.ckpt_path is None and self.trainer.current_epoch == 0
        if self._server is not None and self.backend.data is data and not fresh:
            self.backend.use(device, precision)
            self._server.context.fabric, self._server.quick = fabric, quick
            return
        if stage == "fit":
            self._state, self.latest = None, {}
        self.resolved_seed = int(data.resolved_seed)
        check_actions(self.algorithm, self.client)
        self.client.build(tuple(data.input_shape), data.n_classes)
        self.backend.connect(self.client, data, seed=self.resolved_seed, device=device, precision=precision)
        sizes = {client: int(rows) for client, rows in enumerate(data.n_rows) if rows > 0}
        self._server = Server(
            backend=self.backend,
            module=self.client,
            clients=sorted(sizes),
            sizes=sizes,
            input_shape=tuple(data.input_shape),
            n_classes=data.n_classes,
            context=WorkContext("server", 0, self.resolved_seed, fabric),
            cohort_size=self.cohorts.size(len(sizes)),
            quick=quick,
            planted=_planted(data),
            progress=lambda text: self.report_progress(text),
        )
        self._note_empty(data.n_clients)
        if emulated(device, precision):
            self._server.note(
                f"precision {precision}: this CPU has no instructions for bfloat16, so half precision is many times "
                "slower here than --trainer.precision 32-true"
            )
        self.cohorts.check(len(sizes))
        self.algorithm.check(self._server)
        if stage == "fit":
            names = self.algorithm.metric_names(data.n_classes is not None)
            check_monitors(self.trainer, names | ROUND_METRICS if names else names, len(getattr(data, "val", ())))

    def teardown(self, stage: str) -> None:
        """Ends what the backend runs beside this process; after a fit it stays for the test that mostly follows."""
        if stage != "fit":
            self.backend.close()

    def on_fit_start(self) -> None:
        """Does all that comes before the first round, unless a checkpoint brought it, and saves it."""
        if not self.backend.is_open:
            with self.server.stage("workers"):
                self.backend.open()
        if self._state is not None:
            return
        with self._round(0):
            self.client.initialize(self.resolved_seed)
            self._state = self.algorithm.start(self.server)
        self.backend.traffic.since_mark()
        checkpoint.save_start(self)

    # -- rounds -------------------------------------------------------------------------------------------------

    def round_loader(self) -> Rounds:
        """One cohort per epoch; the data module hands it to the Trainer."""
        return Rounds(lambda: self.cohorts.draw(self.server.clients, self.resolved_seed, self.current_epoch + 1))

    def evaluation_loader(self) -> list[int]:
        """One step that evaluates all clients."""
        return [0]

    def prediction_loader(self) -> Steps:
        """One step per client and split."""
        return Steps([(client, split) for split in SPLITS for client in self.server.clients])

    def training_step(self, cohort: list[int], batch_idx: int) -> None:
        """One round.

        Its bytes are those since the round before ended: models that went out to be validated need not go out again.
        """
        start = time.perf_counter()
        failures = len(self.backend.failures)
        with self._round(self.current_epoch + 1):
            self._state, metrics = self.algorithm.round(self.state, cohort, self.server)
        moved = self.backend.traffic.since_mark()
        metrics = {
            **metrics,
            "clients/asked": float(len(cohort)),
            "clients/failed": float(len(self.backend.failures) - failures),
            "bytes/up": float(moved["up"]),
            "bytes/down": float(moved["down"]),
            "seconds/round": time.perf_counter() - start,
        }
        self._log(metrics, keep=tuple(f"{split}/" for split in SPLITS if split != "train"))
        # Local optimisers are unknown to the Trainer: without these two calls its global_step would stay 0 and
        # ModelCheckpoint would skip every save.
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluates the state on the clients' validation rows."""
        self._evaluate("val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluates the state on the clients' test rows."""
        self._evaluate("test")

    def predict_step(self, batch: tuple[int, str], batch_idx: int) -> dict[str, Any]:
        """Cluster and distance of every row of one client's split."""
        client, split = batch
        with self._round(self.current_epoch):
            reply = self.algorithm.assign(self.state, self.server, int(client), split)
        return {"client": client, "split": split, **reply}

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, saved: dict[str, Any]) -> None:
        """Adds the algorithm's state, the clients' state and the byte counts."""
        if self._state is not None:
            saved[checkpoint.KEY] = checkpoint.export(self)

    def on_load_checkpoint(self, saved: dict[str, Any]) -> None:
        """Restores what `on_save_checkpoint` added.

        Raises:
            ValueError: If the checkpoint is of another method, seed, partition or format.
        """
        self._state = checkpoint.restore(self, saved)

    # -- helpers ------------------------------------------------------------------------------------------------

    @contextmanager
    def _round(self, number: int) -> Iterator[None]:
        self.backend.round = self.server.context.round = number
        # The Trainer's autocast is meant for a step of one model; here it would cover averaging and k-means too.
        # Evaluation may train (a personalised method), which Lightning's inference mode would forbid for good.
        with (
            self.backend.limited_threads(),
            torch.inference_mode(False),
            torch.autocast(self.device.type, enabled=False),
        ):
            yield

    def _evaluate(self, split: str) -> None:
        failures = len(self.backend.failures)
        with self._round(self.current_epoch + (split == "val")), self.server.stage("evaluate"):
            found = self.algorithm.evaluate(self.state, self.server, split)
        metrics = {f"{split}/{name}": value for name, value in found.items()}
        others = tuple(name for name in self.latest if not name.startswith(f"{split}/"))
        failed = len(self.backend.failures) - failures
        if failed and split == "val":  # of the round that is being validated
            metrics["clients/failed"] = self.latest.get("clients/failed", 0.0) + failed
        self._log(metrics, keep=others)

    def _log(self, metrics: Metrics, keep: tuple[str, ...]) -> None:
        """Logs metrics; of the former ones only those that start with an entry of `keep` are still the latest."""
        self.latest = {name: value for name, value in self.latest.items() if name.startswith(keep)} | metrics
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    def _note_empty(self, n_clients: int) -> None:
        empty = [client for client in range(n_clients) if client not in self.server.sizes]
        if empty:
            self.server.note(f"clients {empty} hold no training rows and are left out of every stage")


def _planted(data: Any) -> dict[int, int] | None:
    groups = getattr(data, "groups", None)
    return None if groups is None else dict(enumerate(int(group) for group in groups))
