"""The configurations that come with the package, and how `--config NAME` finds one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path


def shipped_configs() -> dict[str, Path]:
    """Stem → file of every configuration that comes with the package."""
    package = Path(__file__).resolve().parents[1]
    for directory in (package / "configs", package.parent / "configs"):
        files = {path.stem: path for path in sorted(directory.glob("*.yaml"))}
        if files:
            return files
    return {}


def find_config(name: str) -> Path:
    """The file that `--config NAME` means: a path if it exists, else a shipped configuration of that name.

    `NAME`, `NAME.yaml` and `configs/NAME.yaml` name shipped ones; any other path that does not exist is a mistake.

    Raises:
        ValueError: If there is neither; lists the shipped ones.
    """
    return find_shipped(name, shipped_configs(), "--config", "configuration", (Path(), Path("configs")))


def find_shipped(
    name: str | Path, shipped: Mapping[str, Path], flag: str, kind: str, folders: Collection[Path]
) -> Path:
    """The file that a name given to a flag means: a path if it exists, else the shipped file of that name.

    Args:
        name: What was given, with or without `.yaml`.
        shipped: Stem → file of those that come with the package.
        flag: The flag, for the message.
        kind: What the files are, for the message.
        folders: A name may stand in one of these folders and still mean a shipped file.

    Raises:
        ValueError: If there is neither; lists the shipped ones.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    stem = path.name.removesuffix(".yaml").removesuffix(".yml")
    if stem in shipped and path.parent in folders:
        return shipped[stem]
    close = difflib.get_close_matches(stem, shipped, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(
        f"{flag}: there is no file {str(name)!r}, and no shipped {kind} {stem!r}{meant}; shipped are "
        f"{', '.join(shipped)}"
    )


def first_comment(path: Path) -> str:
    """The first line of a configuration without its comment sign."""
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("#").strip()
