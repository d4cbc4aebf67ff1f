"""What a checkpoint of a federated run holds: plain values and tensors only, with a format version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedclust.federation.algorithm import State

if TYPE_CHECKING:
    from fedclust.federation.loop import FederatedLoop

KEY = "fedclust"
FORMAT = 1


def export(loop: FederatedLoop) -> dict[str, Any]:
    """Everything beside Lightning's own entries that a resumed run needs."""
    return {
        "format": FORMAT,
        "algorithm": type(loop.algorithm).__name__,
        "seed": loop.resolved_seed,
        "partition": partition_fingerprint(loop.backend.data),
        "state": loop.state.to_flat(),
        "clients": loop.backend.states.export(),
        "traffic": loop.backend.traffic.export(),
        "seconds": dict(loop.seconds),
        "notes": list(loop.notes),
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
        "algorithm": type(loop.algorithm).__name__,
        "seed": loop.resolved_seed,
        "partition": partition_fingerprint(loop.backend.data),
    }
    for name, value in expected.items():
        if entry[name] != value:
            raise ValueError(f"the checkpoint was written with {name} {entry[name]!r}, this run has {value!r}")
    loop.backend.states.load(entry["clients"])
    loop.backend.traffic.load(entry["traffic"])
    server = loop.server
    server.seconds.update(entry["seconds"])
    server.notes[:] = list(dict.fromkeys([*entry["notes"], *server.notes]))
    server.client_values.update(entry["client_values"])
    return loop.algorithm.state_class.from_flat(entry["state"])


def partition_fingerprint(data: Any) -> str:
    """A short digest of which rows each client holds."""
    record = json.dumps(data.partition_record(), sort_keys=True, default=str)
    return hashlib.blake2b(record.encode(), digest_size=8).hexdigest()
