"""What trials share because it does not depend on the sampled values: loaded and dealt rows, UMAP embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedclust.clustering.embeddings import EmbeddingCache, keep_embeddings
from fedclust.data.datamodule import FederatedDataModule


class Shared:
    """One process' store of what trials share.

    Args:
        directory: The study's directory, where processes share embeddings; None keeps them in memory.

    Attributes:
        embeddings: The cache of UMAP embeddings.
        data_reused: Runs that did not have to load and deal the rows.
    """

    def __init__(self, directory: Path | None) -> None:
        self.embeddings = EmbeddingCache(None if directory is None else directory / "cache")
        self.data_reused = 0
        self._data: tuple[str, FederatedDataModule] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Keeps embeddings within the block."""
        with keep_embeddings(self.embeddings):
            yield

    def data_for(self, config: Any, built: Any) -> Any:
        """The data module for a run: the last run's, if its settings and seed are the same.

        Args:
            config: The run's parsed configuration.
            built: The data module that was built for it and has not loaded anything yet.
        """
        if type(built) is not FederatedDataModule:
            return built
        key = json.dumps([config["seed_everything"], _plain(config["data"])], sort_keys=True, default=repr)
        if self._data is not None and self._data[0] == key:
            self.data_reused += 1
            return self._data[1]
        self._data = (key, built)
        return built

    def counts(self) -> dict[str, int]:
        """What was saved so far."""
        return {
            "embeddings_reused": self.embeddings.hits,
            "embeddings_computed": self.embeddings.misses,
            "data_reused": self.data_reused,
        }


def _plain(value: Any) -> Any:
    return value.as_dict() if hasattr(value, "as_dict") else value
