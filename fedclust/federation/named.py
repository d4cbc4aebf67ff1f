"""Objects from what a checkpoint names: the way back from `fedclust.federation.checkpoint.plain_arguments`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

_OWN_PACKAGES = ("fedclust", "lightning_modules")


def made_from(cls: type[Any], arguments: Mapping[str, Any]) -> Any:
    """An object from the plain arguments that a checkpoint holds."""
    given = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            value = made_from(_encoder_class(value["class_path"]), value["init_args"])
        given[name] = value
    return cls(**given)


def named_class(dotted: str, base: type[Any]) -> Any:
    """A class named by a file: of this library, or of a module that the caller has imported already.

    A file must not decide what code is imported.
    """
    found = _named(dotted)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{dotted} is no {base.__name__}")
    return found


def _encoder_class(dotted: str) -> Any:
    """An encoder's class named by a file. Any other class is refused: a file must not choose what is called."""
    found = _named(dotted)
    if not (isinstance(found, type) and all(hasattr(found, name) for name in ("encode", "fingerprint"))):
        raise ValueError(f"{dotted} is no encoder: it lacks encode or fingerprint")
    return found


def _named(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    if module.partition(".")[0] not in _OWN_PACKAGES and module not in sys.modules:
        raise ValueError(f"the file names the class {dotted}; import {module!r} first if you trust it")
    return getattr(import_module(module), name, None)
