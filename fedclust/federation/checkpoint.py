"""What a checkpoint of a federated run holds: plain values and tensors only, with a format version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

import numpy as np
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from fedclust.data.content import same_content
from fedclust.data.tables import SPLITS, Scaling
from fedclust.federation.algorithm import State
from fedclust.federation.errors import Failure

if TYPE_CHECKING:
    from fedclust.federation.loop import FederatedLoop

KEY = "fedclust"
FORMAT = 1
_WORDS = ("source", "partition", "transform", "val_fraction", "test_fraction")
_ADVICE = "use the data and seed of the checkpoint's own run (on the command line: leave --config out to take them)"


def export(loop: FederatedLoop) -> dict[str, Any]:
    """Everything beside Lightning's own entries that a resumed run needs."""
    return {
        "format": FORMAT,
        "algorithm": class_path(type(loop.algorithm)),
        "client": class_path(type(loop.client)),
        "client_args": plain_arguments(loop.client.hparams),
        "input_shape": list(loop.server.input_shape),
        "n_classes": loop.server.n_classes,
        "class_names": getattr(loop.backend.data, "class_names", None),
        "scaling": scaling_tensors(getattr(loop.backend.data, "scaling", None)),
        "limits": getattr(loop.backend.data, "limits", None),
        "seed": loop.resolved_seed,
        **data_entries(loop.backend.data),
        "state": loop.state.to_flat(),
        "n_clients": loop.backend.data.n_clients,
        "clients": loop.backend.states.export(),
        "traffic": loop.backend.traffic.export(),
        "seconds": dict(loop.seconds),
        "notes": list(loop.notes),
        "failures": [vars(failure) for failure in loop.backend.failures],
        "client_values": {client: dict(values) for client, values in loop.server.client_values.items()},
    }


def save_start(loop: FederatedLoop) -> None:
    """Saves `start.ckpt` beside the checkpoints that the Trainer keeps, if it keeps any."""
    keepers = [callback for callback in loop.trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    if loop.server.quick or not keepers:
        return
    keepers.sort(key=lambda keeper: keeper.filename != "last")  # the run's own, before a configured one
    directory = keepers[0].dirpath or str(Path(loop.trainer.default_root_dir) / "checkpoints")
    loop.trainer.save_checkpoint(Path(directory) / "start.ckpt")


def restore(loop: FederatedLoop, saved: Mapping[str, Any]) -> State:
    """Reads what `export` wrote into a loop that has been set up; notes other arguments of the client module.

    Raises:
        ValueError: If the checkpoint does not belong to this run's method, seed, partition or data.
    """
    if KEY not in saved:
        raise ValueError("this checkpoint was not written by a federated run")
    entry = saved[KEY]
    if entry["format"] != FORMAT:
        raise ValueError(f"the checkpoint has format {entry['format']}; this version reads format {FORMAT}")
    compare(entry, "algorithm", class_path(type(loop.algorithm)))
    compare(entry, "seed", loop.resolved_seed)
    compare_data(entry, loop.backend.data)
    loop.backend.states.load(entry["clients"])
    loop.backend.traffic.load(entry["traffic"])
    server = loop.server
    server.seconds.update(entry["seconds"])
    server.notes[:] = list(dict.fromkeys([*entry["notes"], *server.notes]))
    _note_changes(loop, entry)
    server.client_values.update(entry["client_values"])
    loop.backend.failures[:] = [Failure(**failure) for failure in entry["failures"]]
    return loop.algorithm.state_class.from_flat(entry["state"])


def read(path: Path) -> dict[str, Any]:
    """What a checkpoint file holds.

    Raises:
        ValueError: If the file is damaged, is no checkpoint, or holds objects that are not loaded.
    """
    try:
        with ZipFile(path) as archive:  # torch.load does not look at the checksums
            damaged = archive.testzip()
        if damaged is None:
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # damage shows as almost any exception of the readers
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise ValueError(f"{path} is damaged, no checkpoint, or holds objects that are not loaded: {reason}") from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged (or was written without checksums): that of its part {damaged} is wrong")
    if not isinstance(saved, dict):
        raise ValueError(f"{path} is no checkpoint: it holds a {type(saved).__name__}")
    return saved


def data_entries(data: Any) -> dict[str, Any]:
    """What a checkpoint says of the data: a digest of the partition, the words for it, and sums of the rows."""
    record = data.partition_record()
    words = json.loads(json.dumps({name: record.get(name) for name in _WORDS}, default=str))
    clients = record.get("clients", [])
    for split in SPLITS:
        words[f"{split} rows"] = [len(client.get(split, ())) for client in clients]
    content = getattr(data, "content", None)
    return {"partition": _digest(record), "data": words, "content": None if content is None else content[0]}


def compare(entry: Mapping[str, Any], name: str, value: Any) -> None:
    """Raises ValueError if the checkpoint was written with another value."""
    if entry[name] != value:
        raise ValueError(f"the checkpoint was written with {name} {entry[name]!r}, this run has {value!r}; {_ADVICE}")


def compare_data(entry: Mapping[str, Any], data: Any) -> None:
    """Compares with what `data_entries` wrote; checkpoints of older versions say less.

    Raises:
        ValueError: If the checkpoint was written with other rows, or these dealt otherwise.
    """
    own = data_entries(data)
    for name in entry.get("data", {}):
        compare(entry["data"], name, own["data"][name])
    if entry["partition"] != own["partition"]:
        raise ValueError(f"the checkpoint was written with other rows, or rows dealt otherwise to clients; {_ADVICE}")
    known, content = entry.get("content"), getattr(data, "content", None)
    if known is not None and content is not None and not same_content(known, content):
        raise ValueError(
            "the checkpoint was written with other values of the rows: has their file changed, or are they scaled "
            f"or laid out otherwise (scale, layout of the data module)? {_ADVICE}"
        )


def _note_changes(loop: FederatedLoop, entry: Mapping[str, Any]) -> None:
    """Notes the client module's arguments that the checkpoint's run had otherwise: they may be meant."""
    known, own = entry["client_args"], plain_arguments(loop.client.hparams)
    changed = [name for name in known if name in own and own[name] != known[name]]
    if changed:
        words = ", ".join(f"{name} {known[name]!r} (now {own[name]!r})" for name in changed)
        loop.server.note(f"the checkpoint was written with other arguments of the client module: {words}")


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


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
