"""The Python API: a thin layer on the same Trainer, callbacks and loop as the command line."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping

from fedclust.checks import positive_int
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.tables import SPLITS
from fedclust.directions import Direction, better
from fedclust.federation.algorithm import Algorithm
from fedclust.federation.backend import Backend
from fedclust.federation.checkpoint import KEY
from fedclust.federation.client import ClientModule
from fedclust.federation.loop import FederatedLoop
from fedclust.report.predictions import weights_only
from fedclust.report.progress import RoundProgress
from fedclust.report.quiet import quiet_lightning
from fedclust.report.recorder import RunRecorder
from fedclust.report.selection import BestCheckpoint, LastCheckpoint, Monitor, best_checkpoint
from fedclust.result import Result, load, result_from

_NETWORK_SETTINGS = ("lr", "batch_size", "output", "max_grad_norm")

__all__ = ["Result", "cluster", "federate", "load"]


def federate(
    algorithm: Algorithm,
    client: ClientModule,
    data: FederatedDataModule,
    rounds: int = 20,
    *,
    backend: Backend | None = None,
    cohort_size: int | None = None,
    participation: float | None = None,
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true",
    accelerator: str = "cpu",
    monitor: str | None = None,
    mode: Direction | None = None,
    patience: int | None = None,
    directory: str | Path | None = None,
    callbacks: Iterable[Callback] = (),
    progress: bool = True,
) -> Result:
    """Runs a federated algorithm and returns the result of its best round.

    Args:
        algorithm: The server side, such as `fedclust.FedDCN(...)`.
        client: The client side, such as `lightning_modules.DCN(...)`.
        data: The clients' data; its seed is the run's.
        rounds: Number of rounds.
        backend: Carries the messages; default `InProcess()`.
        cohort_size: Clients per round; None takes all.
        participation: Share of the clients per round; None takes all.
        precision: Lightning's name of the precision of local training.
        accelerator: Lightning's name of the device kind.
        monitor: Metric that selects the best round; None takes the algorithm's own, label-free where it can be.
        mode: Whether the monitor is best when "min" or "max"; None takes what is better for the metric, "min" where
            that is not known.
        patience: Stops after so many rounds without gain; None runs all rounds.
        directory: Where checkpoints and the run's files go; None keeps nothing on disk.
        callbacks: Further Lightning callbacks.
        progress: Whether to show progress.

    Returns:
        The result, with test metrics of the best round by the monitor (`val/…` where there are no test rows).

    Raises:
        TypeError: If algorithm, client or data is something else.
        ValueError: For settings that cannot work, before any training.
        fedclust.federation.errors.ClientError: If a client failed and the backend's policy is "raise".
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"rounds must be a positive integer, not {rounds!r}")
    _check_parts(algorithm, client, data)
    if backend is not None and not isinstance(backend, Backend):
        found = f"the class {backend.__name__}" if isinstance(backend, type) else repr(backend)
        raise TypeError(f"backend must be an instance of Backend such as fedclust.Processes(), not {found}")
    if directory is not None and Path(directory).exists() and not Path(directory).is_dir():
        raise ValueError(f"directory {str(directory)!r} is a file")
    if directory is not None and Path(directory).is_dir() and any(Path(directory).iterdir()):
        raise ValueError(f"directory {str(directory)!r} is not empty; every run needs a directory of its own")
    loop = FederatedLoop(algorithm, client, backend, cohort_size, participation)
    chosen = Monitor(*(algorithm.default_monitor if monitor is None else (monitor, mode or better(monitor) or "min")))
    if monitor is not None and monitor.startswith("val/") and not len(data.val):
        raise ValueError(f"monitor {monitor!r} needs validation rows; val_fraction is {data.val_fraction}")
    with ExitStack() as stack:
        stack.callback(loop.backend.close)
        folder = Path(directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="fedclust-")))
        recorder = RunRecorder(directory, monitor=chosen)
        extra = [recorder, *callbacks, *_selection(chosen, patience, folder / "checkpoints", data)]
        if progress:
            extra.append(RoundProgress(chosen.name))
        stack.enter_context(warnings.catch_warnings())
        quiet_lightning()
        trainer = pl.Trainer(
            max_epochs=rounds, precision=precision, accelerator=accelerator, devices=1, logger=False,
            default_root_dir=folder, callbacks=extra, num_sanity_val_steps=0, enable_model_summary=False,
            enable_progress_bar=progress,
        )  # fmt: skip
        try:
            trainer.fit(loop, datamodule=data, **weights_only(trainer.fit))
        except SystemExit as stop:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from stop
        history = list(recorder.history)
        path = best_checkpoint(trainer)
        entry = _entry(trainer, loop, folder, path)
        metrics = _measured(trainer, loop, data, path) if len(data.test) else _validated(recorder)
    extras = {
        "metrics": metrics, "history": history, "notes": list(loop.notes), "summary": dict(recorder.summary)
    }  # fmt: skip
    return result_from(entry, extras, type(algorithm), type(client))


def _check_parts(*parts: Any) -> None:
    """Raises TypeError unless these are an algorithm, a client module and a data module."""
    kinds = {"algorithm": Algorithm, "client": ClientModule, "data": FederatedDataModule}
    for (name, kind), part in zip(kinds.items(), parts, strict=True):
        if not isinstance(part, kind):
            found = part.__name__ if isinstance(part, type) else type(part).__name__
            called = "the class " if isinstance(part, type) else "of "
            raise TypeError(
                f"{name} must be an instance of {kind.__name__}, not {called}{found}; federate(algorithm, client, data)"
            )


def _selection(chosen: Monitor, patience: int | None, checkpoints: Path, data: FederatedDataModule) -> list[Callback]:
    """What keeps the last and the best round, and what stops the run.

    Raises:
        ValueError: For a patience without the rows that its monitor needs.
    """
    found: list[Callback] = [LastCheckpoint(checkpoints)]
    if len(data.val) or not chosen.name.startswith("val/"):
        found.append(BestCheckpoint(checkpoints, chosen.name, chosen.mode))
    elif patience is not None:
        raise ValueError(f"patience needs validation rows for {chosen.name}; val_fraction is {data.val_fraction}")
    if patience is not None:
        positive_int("patience", patience)
        found.append(EarlyStopping(chosen.name, mode=chosen.mode, patience=patience, check_finite=False))
    return found


def _validated(recorder: RunRecorder) -> dict[str, float]:
    """Validation metrics of the selected round, for data without test rows."""
    return {name: value for name, value in recorder.summary["metrics"].items() if name.startswith("val/")}


def _measured(
    trainer: pl.Trainer, loop: FederatedLoop, data: FederatedDataModule, path: Path | None
) -> dict[str, float]:  # fmt: skip
    """Test metrics of the selected round."""
    best = None if path is None else str(path)
    trainer.test(loop, datamodule=data, ckpt_path=best, verbose=False, **weights_only(trainer.test))
    return {name: value for name, value in loop.latest.items() if name.startswith("test/")}


def cluster(
    clients: Sequence[Any],
    n_clusters: int,
    *,
    rounds: int = 20,
    seed: int = 0,
    hidden_dims: Sequence[int] | None = None,
    latent_dim: int | None = None,
    scale: Literal["standard", "minmax", "none"] = "minmax",
    progress: bool = True,
    **settings: Any,
) -> list[np.ndarray[Any, Any]]:
    """Clusters unlabelled arrays, one per client, with FedDCN; labels mean the same cluster at every client.

    The first run of a process takes about half a minute longer than others: UMAP compiles.

    Args:
        clients: One array (n_i, …) per client, equal row shapes.
        n_clusters: Number of clusters K; every client needs at least that many rows, and two.
        rounds: Rounds of federated training.
        seed: Seed of all draws.
        hidden_dims: Widths of the encoder's hidden layers; None chooses by the number of features.
        latent_dim: Width of the latent space; None takes 5, or the number of features if that is smaller.
        scale: "minmax" maps every feature to [0, 1], "standard" to mean 0 and deviation 1, over all clients' rows.
        progress: Whether to show progress.
        **settings: Further arguments of `fedclust.FedDCN`, and `lr`, `batch_size`, `output` or `max_grad_norm` of
            `lightning_modules.DCN`.

    Returns:
        One (n_i,) int64 array of labels per client, in the order of its rows.

    Raises:
        ValueError: For arrays that do not fit together or are too small, and for unknown settings.
    """
    from fedclust.algorithms.feddcn import FedDCN
    from lightning_modules.dcn import DCN

    _check_arrays(clients)
    known = set(inspect.signature(FedDCN).parameters) | set(_NETWORK_SETTINGS)
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"cluster has no setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    network: dict[str, Any] = {name: settings.pop(name) for name in _NETWORK_SETTINGS if name in settings}
    smallest = min((len(rows) for rows in clients), default=0)
    for client, rows in enumerate(clients):
        if len(rows) < n_clusters:
            raise ValueError(f"client {client} has {len(rows)} rows, fewer than n_clusters={n_clusters}")
    # Validation rows choose the best round; where they would leave a client too few, the last round is taken.
    val_fraction = 0.1 if int(0.9 * smallest) >= n_clusters + 2 else 0.0
    data = FederatedDataModule(list(clients), seed=seed, test_fraction=0.0, val_fraction=val_fraction, scale=scale)
    rows = len(data.train)
    network = {
        "output": "sigmoid" if scale == "minmax" else "linear", "lr": 2.4e-3, "batch_size": 32 if rows < 5000 else 256,
        **network,
    }  # fmt: skip
    module = DCN(n_clusters=n_clusters, **_widths(data, hidden_dims, latent_dim), **network)
    chosen: dict[str, Any] = {
        "recon_weight": 0.58, "cluster_weight": 0.0006, "geometry_pretrain": 0.2, "geometry_federated": 0.0017,
        "n_synthetic": min(2000, max(rows, 10 * n_clusters)), "sampling": "diagonal", "counts": "assigned",
    }  # fmt: skip
    result = federate(FedDCN(**{**chosen, **settings}), module, data, rounds, progress=progress)
    return labels_in_order(result, data)


def _widths(data: FederatedDataModule, hidden_dims: Sequence[int] | None, latent_dim: int | None) -> dict[str, Any]:
    """The network's widths, chosen by the number of features where they are not given."""
    features = int(np.prod(data.input_shape))
    hidden = [128] if features <= 256 else [512, 256]
    return {
        "hidden_dims": hidden if hidden_dims is None else hidden_dims,
        "latent_dim": min(5, features) if latent_dim is None else latent_dim,
    }


def _check_arrays(clients: Any) -> None:
    """Refuses what is no list of arrays, with a hint."""
    if isinstance(clients, np.ndarray) or not isinstance(clients, Sequence):
        raise ValueError(f"clients must be a list with one array per client, not {type(clients).__name__}")
    for client, rows in enumerate(clients):
        if not isinstance(rows, np.ndarray | torch.Tensor):
            hint = {"tuple": "; labels are not needed: leave them out", "DataFrame": "; use its to_numpy()"}
            kind = type(rows).__name__
            raise ValueError(f"client {client} must be a numpy array or torch tensor, not {kind}{hint.get(kind, '')}")


def labels_in_order(result: Result, data: FederatedDataModule) -> list[np.ndarray[Any, Any]]:
    """Labels of all rows of every client, in the order in which the client's array held them."""
    module: Any = result.module
    labels = []
    for client in range(data.n_clients):
        tables = [getattr(data.client(client), split) for split in SPLITS]
        rows = np.concatenate([table.rows for table in tables])
        found = torch.cat([module.assignments(table.x)[0] for table in tables]).numpy()
        labels.append(found[np.argsort(rows)])
    return labels


def _entry(trainer: pl.Trainer, loop: FederatedLoop, folder: Path, path: Path | None) -> dict[str, Any]:
    """The checkpoint entry of the selected round."""
    if path is None:
        path = folder / "checkpoints" / "selected.ckpt"
        trainer.save_checkpoint(path)
    saved = torch.load(path, map_location="cpu", weights_only=True)
    entry: dict[str, Any] = saved[KEY]
    return entry
