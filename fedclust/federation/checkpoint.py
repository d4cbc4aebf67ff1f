"""What a checkpoint of a federated run holds: plain values and tensors only, with a format version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedclust.data.tables import Scaling
from fedclust.federation.algorithm import State
from fedclust.federation.errors import Failure

if TYPE_CHECKING:
    from fedclust.federation.loop import FederatedLoop

KEY = "fedclust"
FORMAT = 1


def export(loop: FederatedLoop) -> dict[str, Any]:
    """Everything beside Lightning's own entries that a resumed run needs."""
    return {
        "format": FORMAT,
        "algorithm": class_path(type(loop.algorithm)),
        "client": class_path(type(loop.client)),
        "client_args": plain_arguments(loop.client.hparams),
        "input_shape": list(loop.server.input_shape),
        "n_classes": loop.server.n_classes,
        "scaling": scaling_tensors(getattr(loop.backend.data, "scaling", None)),
        "seed": loop.resolved_seed,
        "partition": partition_fingerprint(loop.backend.data),
        "state": loop.state.to_flat(),
        "n_clients": loop.backend.data.n_clients,
        "clients": loop.backend.states.export(),
        "traffic": loop.backend.traffic.export(),
        "seconds": dict(loop.seconds),
        "notes": list(loop.notes),
        "failures": [vars(failure) for failure in loop.backend.failures],
        "client_values": {client: dict(values) for client, values in loop.server.client_values.items()},
    }


def restore(loop: FederatedLoop, saved: Mapping[str, Any]) -> State:
    """Reads what `export` wrote into a loop that has been set up.

    Raises:
        ValueError: If the checkpoint does not belong to this run's method, seed or partition.
    """
    if KEY not in saved:
        raise ValueError("this checkpoint was not written by a federated run")
    entry = saved[KEY]
    if entry["format"] != FORMAT:
        raise ValueError(f"the checkpoint has format {entry['format']}; this version reads format {FORMAT}")
    expected = {
        "algorithm": class_path(type(loop.algorithm)),
        "seed": loop.resolved_seed,
        "partition": partition_fingerprint(loop.backend.data),
    }
    for name, value in expected.items():
        if entry[name] != value:
            raise ValueError(
                f"the checkpoint was written with {name} {entry[name]!r}, this run has {value!r}; use the "
                "configuration and seed of the checkpoint's own run (leave --config out to take them)"
            )
    loop.backend.states.load(entry["clients"])
    loop.backend.traffic.load(entry["traffic"])
    server = loop.server
    server.seconds.update(entry["seconds"])
    server.notes[:] = list(dict.fromkeys([*entry["notes"], *server.notes]))
    server.client_values.update(entry["client_values"])
    loop.backend.failures[:] = [Failure(**failure) for failure in entry["failures"]]
    return loop.algorithm.state_class.from_flat(entry["state"])


def class_path(cls: type) -> str:
    """Dotted path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A module's arguments as plain values, so that a checkpoint loads without pickled objects.

    An object that knows the arguments it was made from (`init_args`) becomes {"class_path": …, "init_args": …}.

    Raises:
        TypeError: If an argument is of another type; names it.
    """
    plain: dict[str, Any] = {}
    for name, value in arguments.items():
        own = getattr(value, "init_args", None)
        if isinstance(own, Mapping):
            plain[name] = {"class_path": class_path(type(value)), "init_args": plain_arguments(own)}
            continue
        value = list(value) if isinstance(value, tuple) else value
        value = value.item() if isinstance(value, np.generic) else value
        entries = value if isinstance(value, list) else [value]
        if not all(entry is None or isinstance(entry, (bool, int, float, str)) for entry in entries):
            kind = type(value).__name__
            raise TypeError(f"argument {name!r} is a {kind}; arguments of a client module must be plain values")
        plain[name] = value
    return plain


def scaling_tensors(scaling: Scaling | None) -> dict[str, torch.Tensor] | None:
    """A scaling as tensors."""
    if scaling is None:
        return None
    return {"shift": torch.as_tensor(scaling.shift), "width": torch.as_tensor(scaling.width)}


def partition_fingerprint(data: Any) -> str:
    """A short digest of which rows each client holds."""
    record = json.dumps(data.partition_record(), sort_keys=True, default=str)
    return hashlib.blake2b(record.encode(), digest_size=8).hexdigest()
