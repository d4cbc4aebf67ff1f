"""What a finished run gives: metrics, history, and a model that predicts, saves and loads."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.data.inputs import Inputs
from fedclust.data.tables import Scaling
from fedclust.federation import checkpoint
from fedclust.federation.algorithm import Algorithm, State
from fedclust.federation.checkpoint import FORMAT, KEY
from fedclust.federation.client import ClientModule
from fedclust.federation.context import ClientContext, make_fabric
from fedclust.federation.message import Message, unpack
from fedclust.federation.named import made_from, named_class

_EXTRAS = "result"


@dataclass
class Result:
    """A trained federated clustering.

    Attributes:
        metrics: Final metrics of the selected round, `test/…`, or `val/…` where the data has no test rows. Of a
            checkpoint of another round, its `val/…`.
        history: One dict per round.
        notes: Sentences worth reading: unpopulated clusters, empty clients, a collapsed clustering.
        summary: What summary.json of the run holds.
        state: The algorithm's state.
        algorithm: The method's class.
        module: The client module with the state's model.
        entry: The run's checkpoint entry, from which `save` writes.
    """

    metrics: dict[str, float]
    history: list[dict[str, float]] = field(repr=False)
    notes: list[str]
    summary: dict[str, Any] = field(repr=False)
    state: State = field(repr=False)
    algorithm: type[Algorithm] = field(repr=False)
    module: ClientModule = field(repr=False)
    entry: dict[str, Any] = field(repr=False)

    @property
    def collapsed(self) -> bool:
        """Whether the clustering is degenerate: one cluster holds nearly all rows, or the latents are constant."""
        return any(name.endswith("/collapsed") and value for name, value in self.metrics.items())

    @property
    def class_names(self) -> list[str] | None:
        """Name of each class index, as the source's labels read; None where there are none or they are not known."""
        names = self.entry.get("class_names")
        return None if names is None else list(names)

    @property
    def assignments(self) -> dict[int, int]:
        """Client id → the cluster of the client's group, for the clients that have one.

        Raises:
            ValueError: If the method does not group clients.
        """
        found = self.algorithm.assignments(self.state)
        if found is None:
            raise ValueError(f"{self.algorithm.__name__} does not group clients, so no client has a group")
        return found

    def assign(self, new_client: Any) -> int:
        """The cluster of a client that was not there; how it is found, the method's documentation says.

        Args:
            new_client: The client's rows as for `predict`, a pair (rows, labels as the source had them), a `Table` or
                a `ClientData`, whose class indices are matched by the class names that they carry.

        Raises:
            ValueError: If the method does not group clients, needs labels, or the rows do not fit.
        """
        data = self._inputs().client(new_client)
        fabric = make_fabric(torch.device("cpu"), "32-true")
        ctx = ClientContext("the new client", 1, self.entry["seed"], fabric, data=data)
        return self.algorithm.assign_client(self.state, self._new_module(), ctx)

    def signature(self, client: int) -> Message:
        """What describes a client's data where clients are grouped by it; the method says what it holds.

        Raises:
            ValueError: If the method asks for no such thing, or has none of this client.
        """
        return self.algorithm.signature_of(self.state, client, self._own_state(client))

    def module_of_cluster(self, cluster: int) -> ClientModule:
        """A module with the model of one cluster of clients, for a client that `assign` put there.

        Raises:
            ValueError: If the method has no model per cluster, or no such cluster.
        """
        module = self.algorithm.module_for_cluster(self.state, self._new_module(), cluster)
        module.eval()
        return module

    def module_of(self, client: int) -> ClientModule:
        """A module with the model that one client uses: its own where the method keeps one, else the same for all.

        Raises:
            ValueError: If there is no such client.
        """
        state = self._own_state(client)
        groups = self.algorithm.assignments(self.state)
        if groups is not None and client not in groups and self.algorithm.personal:
            warnings.warn(f"client {client} has no group, as no round had it; its model is untrained", stacklevel=3)
        module = self.algorithm.module_for_client(self.state, self._new_module(), client, state)
        module.eval()
        return module

    def predict(self, x: Any, client: int | None = None, *, cluster: int | None = None) -> np.ndarray[Any, Any]:
        """Cluster of every row, or its class where the method learns classes.

        Args:
            x: Rows as the data source had them, (n, *input_shape), or images with the channels last, or flat (n,
                features) in the order of `input_shape`, channels first. uint8 is divided by 255, a fitted scaling
                ("minmax", "standard") is applied, all else is taken as it is: digits come divided by 16 from their
                source. Or a `Table` of a data module, such as `data.test`, whose rows are scaled already.
            client: Whose model to use; needed where each client or cluster has a model of its own.
            cluster: Which cluster's model to use instead, such as the one that `assign` gave.

        Returns:
            (n,) int64. Classes are indices into `class_names`.

        Raises:
            ValueError: For another number of features, values that are not finite, an unknown client, or none where
                one is needed.
        """
        return self._assignments(self._inputs().rows(x), client, cluster)[0].numpy()

    def distances(self, x: Any, client: int | None = None, *, cluster: int | None = None) -> np.ndarray[Any, Any]:
        """Distance of every row to its cluster's centre in the latent space, (n,) float32.

        Where the method learns classes: one minus the predicted class's probability.
        """
        return self._assignments(self._inputs().rows(x), client, cluster)[1].numpy()

    def transform(self, x: Any) -> np.ndarray[Any, Any]:
        """Latents of every row, (n, latent_dim) float32.

        Raises:
            ValueError: If the model has no latent space, or the rows do not fit.
        """
        module: Any = self.module
        if not hasattr(module, "latents"):
            raise ValueError(f"{type(module).__name__} has no latent space")
        return np.asarray(module.latents(self._inputs().rows(x)).cpu().numpy())

    def save(self, path: str | Path) -> Path:
        """Writes the result to one file that `fedclust.load` reads; returns its path.

        Raises:
            ValueError: If the file's directory does not exist.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise ValueError(f"cannot save to {path}: there is no directory {path.parent}")
        extras = {
            "metrics": dict(self.metrics),
            "history": [dict(row) for row in self.history],
            "notes": list(self.notes),
            "summary": self.summary,
        }
        torch.save({KEY: self.entry, _EXTRAS: extras}, path)
        return path

    @property
    def _has_cluster_models(self) -> bool:
        return any("module_for_cluster" in vars(kind) for kind in self.algorithm.__mro__ if kind is not Algorithm)

    def _own_state(self, client: int) -> Message:
        known = range(self.entry["n_clients"])
        if isinstance(client, bool) or client not in known:
            raise ValueError(f"there is no client {client!r}; ids are 0..{len(known) - 1}")
        own = self.entry["clients"].get(client)
        return {} if own is None else unpack(own)

    def _inputs(self) -> Inputs:
        saved = self.entry["scaling"]
        scaling = None if saved is None else Scaling(saved["shift"].numpy(), saved["width"].numpy())
        shape, limits = tuple(self.entry["input_shape"]), self.entry.get("limits")
        return Inputs(shape, self.entry["n_classes"], scaling, limits, self.class_names)

    def _new_module(self) -> ClientModule:
        module = made_from(type(self.module), self.entry["client_args"])
        module.build(tuple(self.entry["input_shape"]), self.entry["n_classes"])
        return module

    def _assignments(self, rows: Tensor, client: int | None, cluster: int | None) -> tuple[Tensor, Tensor]:
        if client is not None and cluster is not None:
            raise ValueError("give a client or a cluster, not both")
        if client is None and cluster is None and self.algorithm.personal:
            raise ValueError(
                f"with {self.algorithm.__name__} each client has a model of its own: say whose to use, client=0 … "
                f"{self.entry['n_clients'] - 1}"
                + (", or cluster=… as `assign` gives it to a new client" if self._has_cluster_models else "")
            )
        module: Any = self.module
        if client is not None:
            module = self.module_of(client)
        elif cluster is not None:
            module = self.module_of_cluster(cluster)
        labels, distances = module.assignments(rows)
        return labels, distances


def load(path: str | Path) -> Result:
    """Reads a result: a file that `Result.save` wrote, a checkpoint, or a run directory (its best checkpoint).

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, no federated run's, or of another format.
    """
    path = _checkpoint_in(Path(path))
    saved = checkpoint.read(path)
    if not isinstance(saved.get(KEY), dict):
        raise ValueError(f"{path} was not written by a federated run")
    entry = saved[KEY]
    if entry.get("format") != FORMAT:
        raise ValueError(f"{path} has format {entry.get('format')}; this version reads format {FORMAT}")
    try:
        if _EXTRAS in saved:
            return result_from(entry, saved[_EXTRAS])
        # One step of the Trainer is one round; its epoch is one behind while a round is being saved, but not later.
        recorded = _recorded(path.parent.parent, saved["global_step"])
        return result_from(entry, {"notes": entry["notes"], **recorded})
    except (LookupError, UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}, or a file of its run, is damaged: {type(error).__name__} {error}") from error


def result_from(
    entry: dict[str, Any],
    extras: Mapping[str, Any],
    algorithm: type[Algorithm] | None = None,
    client: type[ClientModule] | None = None,
) -> Result:
    """Builds a result from a checkpoint entry.

    Args:
        entry: What a checkpoint holds under "fedclust".
        extras: Metrics, history, notes and summary.
        algorithm: The algorithm's class; None looks up the entry's.
        client: The client module's class; None looks up the entry's.
    """
    algorithm = algorithm or named_class(entry["algorithm"], Algorithm)
    client = client or named_class(entry["client"], ClientModule)
    module: ClientModule = made_from(client, entry["client_args"])
    module.build(tuple(entry["input_shape"]), entry["n_classes"])
    state = algorithm.state_class.from_flat(entry["state"])
    algorithm.module_for(state, module)
    module.eval()
    return Result(
        metrics=dict(extras["metrics"]), history=list(extras["history"]), notes=list(extras["notes"]),
        summary=dict(extras["summary"]), state=state, algorithm=algorithm, module=module, entry=entry,
    )  # fmt: skip


def _checkpoint_in(path: Path) -> Path:
    if path.is_dir():
        candidates = [path / "checkpoints" / name for name in ("best.ckpt", "last.ckpt")]
        found = next((candidate for candidate in candidates if candidate.is_file()), None)
        if found is None:
            raise FileNotFoundError(f"{path} holds no checkpoint; looked for {', '.join(map(str, candidates))}")
        return found
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return path


def _recorded(run: Path, number: int) -> dict[str, Any]:
    """History and summary that a run directory holds beside its checkpoints, and the metrics of one round."""
    summary, rows = run / "summary.json", run / "metrics.csv"
    if not summary.is_file() or not rows.is_file():
        return {"metrics": {}, "history": [], "summary": {}}
    read = json.loads(summary.read_text(encoding="utf-8"))
    with rows.open(encoding="utf-8", newline="") as file:
        history = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    metrics = read["metrics"] if read.get("selected_round") == number else {}
    tested = {name: value for name, value in metrics.items() if name.startswith("test/")}
    own = next((row for row in history if row["round"] == number), {})
    validated = {name: value for name, value in own.items() if name.startswith("val/")}
    return {"metrics": tested or validated, "history": history, "summary": read}
