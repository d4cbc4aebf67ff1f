"""What a finished run gives: metrics, history, and a model that predicts, saves and loads."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor

from fedclust.data.tables import Scaling, Table
from fedclust.federation.algorithm import Algorithm, State
from fedclust.federation.checkpoint import FORMAT, KEY
from fedclust.federation.client import ClientModule

_EXTRAS = "result"
_OWN_PACKAGES = ("fedclust", "lightning_modules")


@dataclass
class Result:
    """A trained federated clustering.

    Attributes:
        metrics: Final metrics of the selected round, `test/…`, or `val/…` where the data has no test rows.
        history: One dict per round.
        notes: Sentences worth reading: unpopulated clusters, empty clients, a collapsed clustering.
        summary: What summary.json of the run holds.
        state: The algorithm's state.
        module: The client module with the state's model.
        entry: The run's checkpoint entry, from which `save` writes.
    """

    metrics: dict[str, float]
    history: list[dict[str, float]] = field(repr=False)
    notes: list[str]
    summary: dict[str, Any] = field(repr=False)
    state: State = field(repr=False)
    module: ClientModule = field(repr=False)
    entry: dict[str, Any] = field(repr=False)

    @property
    def collapsed(self) -> bool:
        """Whether the clustering is degenerate: one cluster holds nearly all rows, or the latents are constant."""
        return any(name.endswith("/collapsed") and value for name, value in self.metrics.items())

    def predict(self, x: Any) -> np.ndarray[Any, Any]:
        """Cluster of every row.

        Args:
            x: Rows as the data source had them, (n, *input_shape) or flat (n, features): uint8 is divided by 255, a
                fitted scaling ("minmax", "standard") is applied, all else is taken as it is. Or a `Table` of a data
                module, such as `data.test`, whose rows are scaled already.

        Returns:
            (n,) int64.

        Raises:
            ValueError: For another number of features, or values that are not finite.
        """
        return self._assignments(x)[0].numpy()

    def distances(self, x: Any) -> np.ndarray[Any, Any]:
        """Euclidean distance in the latent space of every row to its cluster's centre, (n,) float32."""
        return self._assignments(x)[1].numpy()

    def transform(self, x: Any) -> np.ndarray[Any, Any]:
        """Latents of every row, (n, latent_dim) float32."""
        module: Any = self.module
        return np.asarray(module.latents(self._rows(x)).cpu().numpy())

    def save(self, path: str | Path) -> Path:
        """Writes the result to one file that `fedclust.load` reads; returns its path."""
        path = Path(path)
        extras = {
            "metrics": dict(self.metrics),
            "history": [dict(row) for row in self.history],
            "notes": list(self.notes),
            "summary": self.summary,
        }
        torch.save({KEY: self.entry, _EXTRAS: extras}, path)
        return path

    def _assignments(self, x: Any) -> tuple[Tensor, Tensor]:
        module: Any = self.module
        labels, distances = module.assignments(self._rows(x))
        return labels, distances

    def _rows(self, x: Any) -> Tensor:
        if isinstance(x, Table):
            return x.x
        values = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
        shape = tuple(self.entry["input_shape"])
        features = int(np.prod(shape))
        same = values.shape[1:] == (features,) or _without_ones(values.shape[1:]) == _without_ones(shape)
        if values.ndim < 2 or not same:
            wanted = f"(n, {', '.join(map(str, shape))})" + (f" or (n, {features})" if len(shape) > 1 else "")
            raise ValueError(f"x must have shape {wanted}, not {values.shape}")
        values = values.reshape(len(values), *shape)
        scaling = self.entry["scaling"]
        if scaling is not None:
            values = Scaling(scaling["shift"].numpy(), scaling["width"].numpy()).apply(values)
        elif values.dtype == np.uint8:
            values = np.divide(values, 255, dtype=np.float32)
        values = np.ascontiguousarray(values, dtype=np.float32)
        bad = ~np.isfinite(values.reshape(len(values), features)).all(axis=1)
        if bad.any():
            raise ValueError(f"{int(bad.sum())} rows of x hold NaN or infinite values, first row {int(bad.argmax())}")
        return torch.from_numpy(values)


def load(path: str | Path) -> Result:
    """Reads a result: a file that `Result.save` wrote, a checkpoint, or a run directory (its best checkpoint).

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no federated run's, or of another format.
    """
    path = _checkpoint_in(Path(path))
    if not is_zipfile(path):
        raise ValueError(f"{path} is no checkpoint of a federated run: it is no archive that torch.save wrote")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(saved, Mapping) or KEY not in saved:
        raise ValueError(f"{path} was not written by a federated run")
    entry = saved[KEY]
    if entry.get("format") != FORMAT:
        raise ValueError(f"{path} has format {entry.get('format')}; this version reads format {FORMAT}")
    if _EXTRAS in saved:
        return result_from(entry, saved[_EXTRAS])
    return result_from(entry, {"notes": entry["notes"], **_recorded(path.parent.parent)})


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
    algorithm = algorithm or _class(entry["algorithm"], Algorithm)
    client = client or _class(entry["client"], ClientModule)
    module = client(**entry["client_args"])
    module.build(tuple(entry["input_shape"]), entry["n_classes"])
    state = algorithm.state_class.from_flat(entry["state"])
    algorithm.module_for(state, module)
    module.eval()
    return Result(
        metrics=dict(extras["metrics"]), history=list(extras["history"]), notes=list(extras["notes"]),
        summary=dict(extras["summary"]), state=state, module=module, entry=entry,
    )  # fmt: skip


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)


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


def _recorded(run: Path) -> dict[str, Any]:
    """Metrics, history and summary that a run directory holds beside its checkpoints."""
    summary, rows = run / "summary.json", run / "metrics.csv"
    if not summary.is_file() or not rows.is_file():
        return {"metrics": {}, "history": [], "summary": {}}
    read = json.loads(summary.read_text(encoding="utf-8"))
    with rows.open(encoding="utf-8", newline="") as file:
        history = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return {"metrics": read["metrics"], "history": history, "summary": read}


def _class(dotted: str, base: type[Any]) -> Any:
    """A class named by a file: of this library, or of a module that the caller has imported already.

    A file must not decide what code is imported.
    """
    module, _, name = dotted.rpartition(".")
    if module.partition(".")[0] not in _OWN_PACKAGES and module not in sys.modules:
        raise ValueError(f"the file names the class {dotted}; import {module!r} first if you trust it")
    found = getattr(import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{dotted} is no {base.__name__}")
    return found
