"""What a wrong name in a configuration was probably meant to be."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

_OPTION = re.compile(r"(?P<kind>[A-Za-z_][\w.]*\.[A-Za-z_]\w*): Option '(?P<name>[^']+)' is not accepted")
_CLASS = re.compile(r"there is no class (?P<name>[A-Za-z_]\w*), give its import path")
_TRAINER = re.compile(r"unrecognized arguments: --trainer\.(?P<name>\w+)")
_PACKAGES = ("fedclust", "lightning_modules", "pytorch_lightning.callbacks", "pytorch_lightning.loggers")


def with_hint(text: str) -> str:
    """A parser's message, and what comes close to the name that it refuses: fields of the class, known classes."""
    if found := _OPTION.search(text):
        return text + _of_fields(found["name"], found["kind"])
    if found := _CLASS.search(text):
        homes = [package for package in _PACKAGES if hasattr(importlib.import_module(package), found["name"])]
        return text + (f"; did you mean {homes[0]}.{found['name']}?" if homes else "")
    if found := _TRAINER.search(text):
        import pytorch_lightning as pl

        return text + _meant(found["name"], _fields(pl.Trainer), "--trainer.")
    return text


def _of_fields(name: str, kind: str) -> str:
    module, _, last = kind.rpartition(".")
    try:
        fields = _fields(getattr(importlib.import_module(module), last))
    except (ImportError, AttributeError, ValueError):
        return ""
    return _meant(name, fields) or (f"; {last} takes {', '.join(fields)}" if fields else "")


def _fields(kind: Any) -> list[str]:
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(kind).parameters.values()
    return [parameter.name for parameter in found if parameter.kind not in several]


def _meant(name: str, known: Iterable[str], prefix: str = "") -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
