"""Readers of files: IDX (MNIST), `.npz` arrays, folders of images."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedclust.data.prepare import RawData

AnyArray = np.ndarray[Any, Any]
_IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def read_idx(path: Path) -> AnyArray:
    """Read unsigned bytes in IDX format (the MNIST files), plain or gzipped.

    The plain file goes through torchvision's reader. A `.gz` is unpacked in memory, which torchvision cannot do.

    Raises:
        ValueError: If the file is not a complete IDX file of unsigned bytes.
    """
    try:
        if path.suffix == ".gz":
            return _parse_idx(gzip.decompress(path.read_bytes()))
        from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

        found: AnyArray = read_sn3_pascalvincent_tensor(str(path)).numpy()
    except (OSError, EOFError, ValueError, AssertionError, KeyError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path} is not a complete IDX file of unsigned bytes: {error}") from error
    if found.dtype != np.uint8:
        raise ValueError(f"{path} is not a complete IDX file of unsigned bytes: it holds {found.dtype}")
    return found


def _parse_idx(data: bytes) -> AnyArray:
    """IDX: two zero bytes, type code (8 = unsigned byte), number of axes, each length as big-endian int32, values."""
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise ValueError(f"it starts with {data[:4].hex()}, expected 000008 and the number of axes")
    n_axes = data[3]
    header = 4 + 4 * n_axes
    if len(data) < header:
        raise ValueError("it ends inside the header")
    shape = tuple(int(length) for length in np.frombuffer(data, dtype=">i4", count=n_axes, offset=4))
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(data) != expected:
        raise ValueError(f"it has {len(data)} bytes, its header promises {expected}")
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


def read_npz(path: Path) -> RawData:
    """Read an `.npz` with `x_train, y_train, x_test, y_test` or `x, y`; labels and `ids` (and `ids_test`) optional.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no `.npz` of plain arrays, or its names are not the ones above.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.absolute()}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is not an .npz of plain number or string arrays: {error}") from error
    allowed = {"x", "y", "ids"} if "x" in arrays else {"x_train", "y_train", "x_test", "y_test", "ids", "ids_test"}
    unknown = sorted(set(arrays) - allowed)
    if unknown or not {"x", "x_train"} & set(arrays):
        raise ValueError(
            f"{path} holds {sorted(arrays)}; allowed are x, y, ids, or x_train, y_train, x_test, y_test, ids, ids_test"
        )
    if "x" in arrays:
        return RawData(path.stem, arrays["x"], arrays.get("y"), ids=arrays.get("ids"))
    return RawData(
        path.stem,
        arrays["x_train"],
        arrays.get("y_train"),
        arrays.get("x_test"),
        arrays.get("y_test"),
        arrays.get("ids"),
        arrays.get("ids_test"),
    )


def read_image_folder(root: Path, *, image_size: int | None = None, image_channels: int = 3) -> RawData:
    """Read a folder of images in torchvision's `ImageFolder` layout, one sub-folder per class.

    The path of an image is ``root[/train|/test][/client]/class/image.png``. A level of clients is recognised by class
    folders inside its folders; the folder's name becomes the client's id.

    Args:
        root: The folder.
        image_size: Height and width to resize to; None keeps the sizes, which must then all be equal.
        image_channels: 1 (grey) or 3 (colour).

    Raises:
        FileNotFoundError: If the folder is missing or holds no images.
        ValueError: For bad arguments, or images of different sizes without `image_size`.
    """
    if image_channels not in (1, 3) or isinstance(image_channels, bool):
        raise ValueError(f"image_channels must be 1 or 3, got {image_channels!r}")
    if image_size is not None and (isinstance(image_size, bool) or not isinstance(image_size, int) or image_size < 1):
        raise ValueError(f"image_size must be a whole number of at least 1, got {image_size!r}")
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}")
    parts = {part: root / part for part in ("train", "test") if (root / part).is_dir()}
    if "test" in parts and "train" not in parts:
        raise FileNotFoundError(f"{root} has a folder test/ but no train/")
    x, y, ids = _read_part(parts.get("train", root), image_size, image_channels)
    if "test" not in parts:
        return RawData(root.name, x, y, ids=ids)
    x_test, y_test, test_ids = _read_part(parts["test"], image_size, image_channels)
    return RawData(root.name, x, y, x_test, y_test, ids, test_ids)


def _sub_folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _IMAGE_ENDINGS


def _read_part(folder: Path, image_size: int | None, channels: int) -> tuple[AnyArray, AnyArray, AnyArray | None]:
    """Images (n, C, H, W) uint8, class names (n,), client names (n,) or None."""
    children = _sub_folders(folder)
    if not children:
        raise FileNotFoundError(f"{folder} has no sub-folders; needed is one folder of images per class")
    with_clients = all(not any(_is_image(entry) for entry in child.iterdir()) for child in children) and any(
        _sub_folders(child) for child in children
    )
    samples: list[tuple[Path, str, str]] = []
    for client in children if with_clients else [folder]:
        samples += [(path, label, client.name) for path, label in _class_samples(client)]
    x = _load_images([path for path, _, _ in samples], image_size, channels)
    y = np.array([label for _, label, _ in samples])
    return x, y, np.array([client for _, _, client in samples]) if with_clients else None


def _class_samples(folder: Path) -> list[tuple[Path, str]]:
    """Image paths with their class names, through torchvision's own walk over the classes."""
    from torchvision.datasets.folder import find_classes, make_dataset

    classes, class_to_idx = find_classes(str(folder))
    found = make_dataset(str(folder), class_to_idx, extensions=_IMAGE_ENDINGS, allow_empty=True)
    if not found:
        raise FileNotFoundError(f"{folder} holds no images ({', '.join(_IMAGE_ENDINGS)})")
    return [(Path(path), classes[index]) for path, index in found]


def _load_images(paths: Sequence[Path], image_size: int | None, channels: int) -> AnyArray:
    from PIL import Image

    images: list[AnyArray] = []
    for path in paths:
        with Image.open(path) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
            if image_size is not None:
                converted = converted.resize((image_size, image_size), Image.Resampling.BILINEAR)
            pixels = np.asarray(converted, dtype=np.uint8)
        if images and images[0].shape != pixels.shape:
            raise ValueError(
                f"{paths[0]} has size {images[0].shape[:2]} but {path} has {pixels.shape[:2]}: give image_size"
            )
        images.append(pixels)
    stacked = np.stack(images)
    return stacked[:, None] if channels == 1 else np.moveaxis(stacked, 3, 1)
