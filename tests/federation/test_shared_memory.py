"""Messages and rows in shared memory: what comes back, what is left, and what has to go through a pipe."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedclust.federation.errors import Failure
from fedclust.federation.message import digest
from fedclust.federation.parcels import pack_outcome, pack_trip
from fedclust.federation.resident import Outcome, Trip
from fedclust.federation.shared_memory import Reader, Segment, SharedClients, picklable, remove_segment

SHM = Path("/dev/shm")


def segments() -> set[str]:
    return {path.name for path in SHM.glob("fc*")} if SHM.is_dir() else set()


def test_what_goes_through_the_pipe_is_small_whatever_is_sent() -> None:
    segment = Segment()
    failure = Failure(1, 2, "act", "text " * 100_000, "trace " * 100_000)
    names = {f"a rather long name of a value, number {number}": number for number in range(10_000)}
    trip = Trip(1, 2, ["act"], {**names, "blob": bytes(10**6), "text": "x" * 10**6}, {"x": bytes(10**6)})
    try:
        shared = segment.write({"x": torch.ones(10), **names})
        order = pack_trip(2**40, trip, (7, shared), segment)
        done = pack_outcome(2**40, Outcome(1, {"act": {**names, "blob": bytes(10**6)}}, {}), segment)
        failed = pack_outcome(2**40, Outcome(1, {}, {}, failure=failure, error=ValueError("x" * 10**6)), segment)
        assert all(len(pickle.dumps(sent)) < 1000 for sent in (order, done, failed))
    finally:
        segment.close()


def test_messages_come_back_as_they_were() -> None:
    message = {
        "a": torch.arange(6, dtype=torch.int16).reshape(2, 3), "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5),
        "half": torch.ones(3, dtype=torch.bfloat16), "complex": torch.ones(2, dtype=torch.complex64),
        "flags": torch.tensor([True, False]), "array": np.arange(4.0).reshape(2, 2).T, "none": None, "text": "grüß",
        "point": np.array(3), "number": 3, "bytes": b"abc", "no bytes": b"",
        "last": torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "every second": torch.arange(10)[::2], "wide": torch.zeros(1).expand(4),
    }  # fmt: skip
    segment, reader = Segment(), Reader()
    try:
        for _ in range(2):
            read = reader.read(segment.write(message), "slot")
            assert list(read) == list(message)
            for name, value in message.items():
                assert type(read[name]) is type(value)
                assert digest(read[name]) == digest(value)
        assert read["last"].is_contiguous(memory_format=torch.channels_last)
        message["large"] = torch.ones(100_000)
        assert torch.equal(reader.read(segment.write(message), "slot")["large"], message["large"])
    finally:
        reader.close()
        segment.close()


def test_what_a_killed_process_wrote_can_be_removed() -> None:
    segment = Segment("fctest")
    segment.write({"x": torch.ones(50_000)})
    assert "fctest-18" in segments() or not SHM.is_dir()
    remove_segment("fctest")
    assert "fctest-18" not in segments()


def test_rows_are_shared_in_place(blobs: Any) -> None:
    data = blobs((4, 6))
    before = [data.client(client).train.x.clone() for client in range(2)]
    shared = SharedClients(data)
    assert len(shared._tensors) <= 6
    for client in range(2):
        own, there = data.client(client), shared.client(client)
        assert torch.equal(own.train.x, before[client])
        assert own.train.x.data_ptr() == there.train.x.data_ptr()
        assert own.train.x.is_shared()
        for split in ("train", "val", "test"):
            assert torch.equal(getattr(own, split).y, getattr(there, split).y)
            assert np.array_equal(getattr(own, split).rows, getattr(there, split).rows)


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TypeError, match="the thing cannot be sent"):
        picklable(lambda: 0, "the thing")
