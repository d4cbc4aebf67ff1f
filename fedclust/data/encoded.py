"""`Encoded`: a data source seen through a frozen encoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fedclust.checks import positive_int
from fedclust.data.feature_cache import AUTO, FeatureCache, feature_key
from fedclust.data.prepare import scale_inputs
from fedclust.data.sources import SourceLoader, load_source
from fedclust.data.tables import Source

_CHUNK = 1024


@runtime_checkable
class Encoder(Protocol):
    """What `Encoded` needs: one of `lightning_modules.encoders`, or an object of your own."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the features do: a digest of weights and preprocessing."""
        ...

    def encode(self, x: Any) -> Tensor:
        """Features (n, d) float32 of n rows; those of a row do not depend on the other rows."""
        ...


@dataclass(frozen=True)
class Projection:
    """Principal components: ``(x - mean) @ components.T``.

    Attributes:
        mean: float64, shape ``(d,)``.
        components: float64, shape ``(n_components, d)``, orthonormal rows, the largest variance first.
    """

    mean: np.ndarray[Any, Any]
    components: np.ndarray[Any, Any]

    @classmethod
    def fit(cls, x: Tensor, n_components: int) -> Projection:
        """Fits the components of rows (n, d), by scikit-learn and without random draws.

        Raises:
            ValueError: If there are fewer rows or features than components.
        """
        from sklearn.decomposition import PCA

        if n_components > min(x.shape):
            raise ValueError(
                f"n_components must be at most {min(x.shape)}, for {len(x)} training rows of {x.shape[1]} features, "
                f"got {n_components}"
            )
        solver = "covariance_eigh" if len(x) >= x.shape[1] else "full"
        pca = PCA(n_components, svd_solver=solver).fit(x.numpy().astype(np.float64))
        return cls(pca.mean_, pca.components_)

    def apply(self, x: Tensor) -> Tensor:
        """Projects rows (n, d) to (n, n_components), float32."""
        parts = [(part.numpy() - self.mean) @ self.components.T for part in torch.split(x, _CHUNK)]
        return torch.from_numpy(np.concatenate(parts).astype(np.float32))


class Encoded(SourceLoader):
    """A data source whose images are replaced by their features under a frozen encoder; for `FederatedDataModule`.

    Features are computed once and kept on disk, by the content of the rows and the encoder's fingerprint. The data
    module's `scale` works on the features (after the principal components); its `layout`, `image_size` and
    `image_channels` on the images.

    Args:
        source: Anything that `FederatedDataModule` takes as its source; images, uint8 or floats in [0, 1].
        encoder: What makes the features, such as `lightning_modules.encoders.EfficientNetLite0()`.
        root: Where the files of a named data set lie; None takes the data module's `root`.
        n_components: Number of principal components to keep, fitted on the pooled training rows (the later validation
            rows among them); None keeps all features.
        cache_dir: Where features are kept: "auto" is ``$FEDCLUST_CACHE``, else ``~/.cache/fedclust``; None keeps none.

    Raises:
        ValueError: For an argument outside its range, or an encoder without `encode` and `fingerprint`.
    """

    def __init__(
        self,
        source: Any,
        encoder: Encoder,
        root: str | None = None,
        n_components: int | None = None,
        cache_dir: str | Path | None = AUTO,
    ) -> None:
        if isinstance(encoder, type):
            name = encoder.__name__
            raise ValueError(f"encoder must be an encoder, not the class {name}: write {name}()")
        if not isinstance(encoder, Encoder):
            raise ValueError(
                f"encoder must have encode(x) and fingerprint, as those in lightning_modules.encoders, got {encoder!r}"
            )
        self.source = source
        self.encoder = encoder
        self.root = root
        self.n_components = None if n_components is None else positive_int("n_components", n_components)
        self.cache = FeatureCache(cache_dir)
        self._projection: Projection | None = None

    @property
    def name(self) -> str:
        """Name of the encoder, for records."""
        return str(getattr(self.encoder, "name", type(self.encoder).__name__))

    def load(self, *, root: str | Path | None = None, scale: str = "auto", **options: Any) -> Source:
        """The source with features as rows.

        Args:
            root: Used where this object has no root of its own.
            scale: How the features are scaled: "auto" or "none" as they are, "minmax", "standard".
            **options: Further arguments of `fedclust.data.sources.load_source`, for the images.

        Raises:
            ValueError: If the images or the features are unusable.
        """
        raw = load_source(self.source, root=root if self.root is None else self.root, **options)
        assert raw.test is not None
        fingerprint = self.encoder.fingerprint
        train = encoded_rows(raw.name, raw.train.x, self.encoder, fingerprint, self.cache)
        # A data set can be without test rows, but not without knowing how wide they would be.
        test = train[:0]
        if len(raw.test):
            test = encoded_rows(raw.name, raw.test.x, self.encoder, fingerprint, self.cache)
        if self.n_components is not None:
            self._projection = Projection.fit(train, self.n_components)
            train, test = self._projection.apply(train), self._projection.apply(test)
        name = f"{raw.name} through {self.name}"
        x, x_test, scaling = scale_inputs(name, train.numpy(), test.numpy(), scale)
        return replace(
            raw,
            name=name,
            train=replace(raw.train, x=torch.from_numpy(x)),
            test=replace(raw.test, x=torch.from_numpy(x_test)),
            scaling=scaling,
            encoder={
                "source": raw.name,
                "name": self.name,
                "fingerprint": fingerprint,
                "n_components": self.n_components,
            },
        )

    def features(self, x: Any) -> Tensor:
        """Features of new images in the form that `fedclust.Result.predict` takes: projected, not scaled.

        Raises:
            ValueError: If principal components are asked for and no data has been loaded that they are fitted on.
        """
        features = self.encoder.encode(x)
        if self.n_components is None:
            return features
        if self._projection is None:
            raise ValueError("the principal components are fitted when data is loaded: call load() or setup() first")
        return self._projection.apply(features)


def encoded_rows(name: str, x: Tensor, encoder: Encoder, fingerprint: str, cache: FeatureCache) -> Tensor:
    """Features (n, d) float32 of rows, from the cache if it has them.

    Args:
        name: Whose rows, for messages.
        x: (n, …) rows on the CPU.
        encoder: What makes the features.
        fingerprint: All that the features depend on beside the rows.
        cache: Where they are kept.

    Raises:
        ValueError: If the encoder refuses the rows, or gives features that cannot be used.
    """
    key = feature_key(x, fingerprint)
    features = cache.get(key)
    if features is None:
        features = _computed(name, x, encoder)
        cache.put(key, features)
    return features


def _computed(name: str, x: Tensor, encoder: Encoder) -> Tensor:
    """Features (n, d) of rows, checked."""
    parts: list[Tensor] = []
    with tqdm(total=len(x), desc=f"encoding {name}", unit="rows", leave=False, disable=None) as progress:
        for chunk in torch.split(x, _CHUNK):
            try:
                part = encoder.encode(chunk)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            if not isinstance(part, Tensor) or part.dtype != torch.float32 or part.shape[:-1] != chunk.shape[:1]:
                found = f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
                raise ValueError(
                    f"{name}: the encoder must give one float32 row of features per image, {len(chunk)} in all, "
                    f"got {found}"
                )
            if parts and part.shape[1] != parts[0].shape[1]:
                raise ValueError(
                    f"{name}: the encoder gives {part.shape[1]} features for {len(chunk)} rows, the first of them row "
                    f"{sum(map(len, parts))}, and {parts[0].shape[1]} for those before"
                )
            parts.append(part.detach().cpu())
            progress.update(len(chunk))
    features = torch.cat(parts)
    bad = ~features.isfinite().all(1)
    if bad.any():
        raise ValueError(
            f"{name}: the encoder gives NaN or infinite features for {int(bad.sum())} of {len(x)} rows, the first of "
            f"them row {int(bad.nonzero()[0])}"
        )
    return features
