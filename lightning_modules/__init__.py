"""Client modules: the client side of every method, each a LightningModule that also trains centrally."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_modules.classifier import Classifier
    from lightning_modules.dcn import DCN
    from lightning_modules.flameche import FLAMECHEClient
    from lightning_modules.fmcl import FMCLClient
    from lightning_modules.pa_cfl import PrivateAdaptiveClient

_HOMES = {
    "Classifier": "lightning_modules.classifier",
    "DCN": "lightning_modules.dcn",
    "FLAMECHEClient": "lightning_modules.flameche",
    "FMCLClient": "lightning_modules.fmcl",
    "PrivateAdaptiveClient": "lightning_modules.pa_cfl",
}

__all__ = ["DCN", "Classifier", "FLAMECHEClient", "FMCLClient", "PrivateAdaptiveClient"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lightning_modules' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
