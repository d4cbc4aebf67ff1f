"""Named data sets and the one door to them, `load_source`. Nothing here opens a network connection.

Where a named data set is looked for, in this order: the `root` argument alone when given; else ``$FEDCLUST_DATA``,
``./data``, and for fashion_mnist ``/usr/share/datasets/fashion-mnist`` (Debian's package dataset-fashion-mnist).
The layout is torchvision's, so a folder filled by torchvision's own download serves as it is.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedclust.arrays import array_of
from fedclust.data.files import read_idx, read_image_folder, read_npz
from fedclust.data.prepare import RawData, build_source, with_test_part
from fedclust.data.tables import Source

AnyArray = np.ndarray[Any, Any]

_IDX_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_USPS_FILES = ("usps.bz2", "usps.t.bz2")
_CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
_SYSTEM_FOLDERS = {"fashion_mnist": "/usr/share/datasets/fashion-mnist"}


class SourceLoader(ABC):
    """Base of objects that make a `Source` by themselves, such as `fedclust.Encoded`."""

    @abstractmethod
    def load(self, **options: Any) -> Source:
        """The source, with a test part; `options` are the arguments of `load_source` beside the first."""


def load_source(
    source: Any,
    *,
    root: str | Path | None = None,
    scale: str = "auto",
    layout: str = "auto",
    test_fraction: float = 0.2,
    image_size: int | None = None,
    image_channels: int = 3,
    ids: AnyArray | None = None,
) -> Source:
    """Load a data set by name, from a file or folder, or from arrays.

    Args:
        source: One of
            a name (digits, mnist, fashion_mnist, usps, cifar10, image_folder);
            a path to an `.npz` file or to a folder of images;
            a `Source`, which is taken as it is;
            a `SourceLoader` such as `fedclust.Encoded`, which gets all other arguments;
            a tuple ``(x,)`` or ``(x, y)`` or ``(x_train, y_train, x_test, y_test)``, or one array without labels;
            a list with one entry per client, each an array or a tuple ``(x, y)``.
            Arrays are numpy arrays or torch tensors.
        root: Where named data sets lie; for image_folder the folder itself. None looks in the places above.
        scale: "auto", "minmax", "standard" or "none", see `fedclust.data.prepare`.
        layout: "auto", "channels_first" or "channels_last", see `fedclust.data.prepare.build_source`.
        test_fraction: Share held out as test part from a source that has none.
        image_size: Height and width for images of a folder.
        image_channels: 1 or 3, for images of a folder.
        ids: Natural client of each training row (of all rows, when the test part is yet to be held out); None keeps
            the ids that the source brings.

    Returns:
        A `Source` with a test part; where it was held out from natural clients, each keeps its share.

    Raises:
        FileNotFoundError: If files are missing; the message says where it looked and how to get them.
        ValueError: If the source is of no known kind, or its content is unusable.
    """
    if isinstance(source, SourceLoader):
        return source.load(
            root=root,
            scale=scale,
            layout=layout,
            test_fraction=test_fraction,
            image_size=image_size,
            image_channels=image_channels,
            ids=ids,
        )
    if isinstance(source, Source):
        if (scale, layout) != ("auto", "auto"):
            raise ValueError(f"a Source is taken as it is: leave scale and layout at auto, got {scale!r}, {layout!r}")
        source = source if ids is None else replace(source, ids=ids, test_ids=None)
        return source if source.test is not None else with_test_part(source, test_fraction)
    if isinstance(source, (str, Path)):
        raw = _read(source, root, image_size, image_channels)
    else:
        raw = _raw_from_arrays(source)
    raw = raw if ids is None else replace(raw, ids=ids, test_ids=None)
    return build_source(raw, scale=scale, layout=layout, test_fraction=test_fraction)


def _read(source: str | Path, root: str | Path | None, image_size: int | None, image_channels: int) -> RawData:
    if isinstance(source, str) and source in _READERS:
        return _READERS[source](root)
    if source == "image_folder" and root is None:
        raise ValueError("source='image_folder' needs root, the folder of images")
    path = Path(str(root) if source == "image_folder" else source).expanduser()
    if path.suffix == ".npz":
        return read_npz(path)
    if path.is_dir() or source == "image_folder":
        return read_image_folder(path, image_size=image_size, image_channels=image_channels)
    raise ValueError(
        f"source {str(source)!r} is neither a known name ({', '.join([*_READERS, 'image_folder'])}) "
        "nor a path to an .npz file or an image folder"
        + ("" if path.is_absolute() or path.exists() else f"; there is no {path} in {Path.cwd()}")
    )


def _digits(root: str | Path | None) -> RawData:
    """scikit-learn's 1797 digits of 8 x 8 pixels; their values 0..16 are divided by 16. `root` is not needed."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return RawData("digits", (bunch.images[:, None] / 16.0).astype(np.float32), bunch.target)


def _mnist(root: str | Path | None) -> RawData:
    return _idx_source("mnist", "MNIST", root)


def _fashion_mnist(root: str | Path | None) -> RawData:
    return _idx_source("fashion_mnist", "FashionMNIST", root)


def _idx_source(name: str, class_name: str, root: str | Path | None) -> RawData:
    folder = _find(name, root, (f"{class_name}/raw", "raw", "."), _IDX_FILES, class_name, endings=("", ".gz"))
    paths = [_present(folder / file, ("", ".gz")) for file in _IDX_FILES]
    x, y, x_test, y_test = (read_idx(path) for path in paths if path is not None)
    return RawData(name, x, y, x_test, y_test)


def _usps(root: str | Path | None) -> RawData:
    from torchvision.datasets import USPS

    folder = _find("usps", root, (".", "USPS"), _USPS_FILES, "USPS")
    train, test = USPS(folder, train=True), USPS(folder, train=False)
    return RawData("usps", train.data, np.asarray(train.targets), test.data, np.asarray(test.targets))


def _cifar10(root: str | Path | None) -> RawData:
    from torchvision.datasets import CIFAR10

    folder = _find("cifar10", root, ("cifar-10-batches-py", "CIFAR10/cifar-10-batches-py"), _CIFAR10_FILES, "CIFAR10")
    try:
        train, test = CIFAR10(folder.parent, train=True), CIFAR10(folder.parent, train=False)
    except RuntimeError as error:
        raise ValueError(f"cifar10: the files in {folder} are damaged (torchvision: {error})") from error
    classes = np.asarray(train.classes)
    return RawData(
        "cifar10",
        np.moveaxis(train.data, 3, 1),
        np.asarray(train.targets),
        np.moveaxis(test.data, 3, 1),
        np.asarray(test.targets),
        class_names=[str(value) for value in classes],
    )


_READERS: dict[str, Callable[[str | Path | None], RawData]] = {
    "digits": _digits,
    "mnist": _mnist,
    "fashion_mnist": _fashion_mnist,
    "usps": _usps,
    "cifar10": _cifar10,
}


def _present(path: Path, endings: Sequence[str]) -> Path | None:
    """The first of `path` + ending that is a file."""
    return next((found for found in (Path(f"{path}{ending}") for ending in endings) if found.is_file()), None)


def _places(name: str, root: str | Path | None) -> list[Path]:
    if root is not None:
        return [Path(root).expanduser()]
    places = [Path(os.environ["FEDCLUST_DATA"]).expanduser()] if os.environ.get("FEDCLUST_DATA") else []
    places.append(Path("data"))
    if name in _SYSTEM_FOLDERS:
        places.append(Path(_SYSTEM_FOLDERS[name]))
    return places


def _find(
    name: str,
    root: str | Path | None,
    layouts: Sequence[str],
    files: Sequence[str],
    torchvision_class: str,
    *,
    endings: Sequence[str] = ("",),
) -> Path:
    """The first folder that holds all files.

    Raises:
        FileNotFoundError: With every folder looked into, the files needed, and the call that fetches them.
    """
    looked = [place / layout for place in _places(name, root) for layout in layouts]
    for folder in looked:
        if all(_present(folder / file, endings) for file in files):
            return folder
    needed = ", ".join(files) + (" (plain or .gz)" if ".gz" in endings else "")
    target = str(root) if root is not None else "data"
    raise FileNotFoundError(
        f"{name}: files not found. Looked in: {', '.join(str(folder.absolute()) for folder in looked)}. "
        f"Needed in one of these folders: {needed}. Nothing is downloaded for you; to get them, run yourself: "
        f'python -c "from torchvision.datasets import {torchvision_class} as D; '
        f"[D('{target}', train=t, download=True) for t in (True, False)]\" "
        "or point root or $FEDCLUST_DATA to a folder that has them."
    )


def _numpy(value: Any, what: str) -> AnyArray:
    if isinstance(value, Tensor):
        return array_of(value)
    if isinstance(value, np.ndarray):
        return value
    raise ValueError(f"{what} must be a numpy array or torch tensor, got {type(value).__name__}")


def _labels(value: Any, what: str) -> AnyArray | None:
    if value is None:
        return None
    return np.asarray(value) if isinstance(value, list) else _numpy(value, what)


def _raw_from_arrays(source: Any) -> RawData:
    if isinstance(source, list):
        return _raw_from_list(source)
    parts = source if isinstance(source, tuple) else (source,)
    if len(parts) not in (1, 2, 4):
        raise ValueError(
            "source as a tuple must be (x,), (x, y) or (x_train, y_train, x_test, y_test), "
            f"got {len(parts)} entries; arrays of several clients go into a list"
        )
    x, y = _numpy(parts[0], "source x"), _labels(parts[1] if len(parts) > 1 else None, "source y")
    if len(parts) < 4:
        return RawData("arrays", x, y)
    return RawData("arrays", x, y, _numpy(parts[2], "source x_test"), _labels(parts[3], "source y_test"))


def _raw_from_list(clients: list[Any]) -> RawData:
    """One entry per client; the entry's number is the client's natural id."""
    if not clients:
        raise ValueError("source is an empty list; needed is one array per client")
    xs: list[AnyArray] = []
    ys: list[AnyArray | None] = []
    for number, entry in enumerate(clients):
        parts = entry if isinstance(entry, tuple) else (entry,)
        if len(parts) not in (1, 2):
            raise ValueError(f"client {number}: an entry must be an array or (x, y), got {len(parts)} entries")
        xs.append(_numpy(parts[0], f"client {number}: x"))
        ys.append(_labels(parts[1] if len(parts) == 2 else None, f"client {number}: y"))
        if xs[-1].ndim < 2 or len(xs[-1]) == 0:
            raise ValueError(
                f"client {number}: x must have shape (n, features...) with n > 0, got {xs[-1].shape}"
                + ("; leave out clients without rows" if len(xs[-1]) == 0 else "")
            )
        if xs[-1].shape[1:] != xs[0].shape[1:] or xs[-1].dtype != xs[0].dtype:
            raise ValueError(
                f"client {number}: rows are {xs[-1].dtype} {xs[-1].shape[1:]}, "
                f"those of client 0 {xs[0].dtype} {xs[0].shape[1:]}"
            )
        if (ys[-1] is None) != (ys[0] is None):
            raise ValueError(f"client {number}: give labels for all clients or for none")
        y = ys[-1]
        if y is not None and y.shape != (len(xs[-1]),):
            raise ValueError(f"client {number}: labels of shape {y.shape} for {len(xs[-1])} rows")
    ids = np.repeat(np.arange(len(xs)), [len(x) for x in xs])
    labels = [y for y in ys if y is not None]
    return RawData("arrays", np.concatenate(xs), np.concatenate(labels) if labels else None, ids=ids)
