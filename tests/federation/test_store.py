"""Client state between rounds, and byte counts."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from fedclust.federation.message import Message, digest
from fedclust.federation.store import Fingerprints, StateStore, Traffic


def state(value: float, size: int = 10) -> Message:
    return {"v": torch.full((size,), float(value)), "n": 3}


def files(store: StateStore) -> list[str]:
    return sorted(path.name for path in store._files.values() if path.is_file())


@pytest.mark.parametrize("budget", [None, 0, 48, 10_000])
def test_what_was_put_comes_back_at_every_budget(budget: int | None) -> None:
    store = StateStore(budget)
    assert store.get(4) == {}
    for client in (4, 0, 7):
        store.put(client, state(client))
    store.put(0, state(-1))
    for client, value in ((4, 4), (0, -1), (7, 7)):
        back = store.get(client)
        assert back["n"] == 3
        assert torch.equal(back["v"], torch.full((10,), float(value)))


def test_state_beyond_the_budget_lies_in_files_and_returns_to_memory() -> None:
    store = StateStore(115)  # two states of 48 bytes
    for client in (1, 2, 3):
        store.put(client, state(client))
    assert files(store) == ["3.pt"]
    store.put(1, state(1, size=2))  # 16 bytes now
    store.put(3, state(33))
    assert files(store) == []
    assert store.get(3)["v"][0] == 33
    store.put(2, state(2, size=1000))
    assert files(store) == ["2.pt"]
    assert len(store.get(2)["v"]) == 1000


def test_a_state_of_exactly_the_budget_stays_in_memory() -> None:
    store = StateStore(48)
    store.put(0, state(0))
    assert files(store) == []
    store.put(0, state(0, size=11))
    assert files(store) == ["0.pt"]


@pytest.mark.parametrize("budget", [None, 0])
def test_neither_the_giver_nor_the_taker_can_change_what_is_kept(budget: int | None) -> None:
    store = StateStore(budget)
    given = state(1)
    store.put(0, given)
    given["v"].zero_()
    given["new"] = 1
    taken = store.get(0)
    taken["v"].zero_()
    taken["other"] = 2
    assert store.get(0).keys() == {"v", "n"}
    assert store.get(0)["v"].tolist() == [1.0] * 10


def test_export_and_load_replace_everything() -> None:
    first = StateStore(48)
    first.put(0, state(0))
    first.put(1, state(1))
    packed = first.export()
    assert sorted(packed) == [0, 1]
    assert all(isinstance(data, bytes) for data in packed.values())
    second = StateStore(0)
    second.put(5, state(5))
    second.load(packed)
    assert second.get(5) == {}
    assert files(second) == ["0.pt", "1.pt"]
    assert second.get(1)["v"][0] == 1
    second.load({})
    assert second.get(1) == {}
    assert files(second) == []


def test_files_go_away_with_the_store() -> None:
    store = StateStore(0)
    store.put(0, state(0))
    folder = Path(store._files[0]).parent
    assert folder.is_dir()
    del store
    gc.collect()
    assert not folder.exists()


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 0, not -1"):
        StateStore(-1)


def ask(traffic: Traffic, client: int, message: Message, shared: Message, action: str = "a") -> None:
    traffic.down(action, client, {**shared, **message}, Fingerprints().of(shared))


def test_shared_values_count_once_per_client_until_they_change() -> None:
    traffic, big = Traffic(), torch.zeros(100)
    ask(traffic, 0, {"own": 1}, {"big": big, "text": "abc"})
    assert traffic.counts() == {"a": {"up": 0, "down": 411}}
    ask(traffic, 0, {"own": 1}, {"big": big.clone(), "text": "abc"}, "b")
    assert traffic.counts()["b"] == {"up": 0, "down": 8}
    ask(traffic, 1, {}, {"big": big})
    assert traffic.counts()["a"]["down"] == 811
    big[3] = 1
    ask(traffic, 0, {}, {"big": big}, "b")
    assert traffic.counts()["b"]["down"] == 408
    ask(traffic, 0, {}, {"other name": big}, "b")
    assert traffic.counts()["b"]["down"] == 808
    traffic.up("b", {"r": torch.zeros(2, dtype=torch.bool), "s": "é"})
    assert traffic.counts()["b"]["up"] == 4
    assert (traffic.total("up"), traffic.total("down")) == (4, 1619)


def test_a_resumed_count_goes_on_and_does_not_recount() -> None:
    traffic, shared = Traffic(), {"big": torch.zeros(100), "n": 4}
    ask(traffic, 0, {}, shared)
    resumed = Traffic()
    resumed.load(traffic.export())
    ask(resumed, 0, {}, shared)
    assert resumed.counts() == {"a": {"up": 0, "down": 408}}
    ask(resumed, 1, {}, shared)
    assert resumed.counts() == {"a": {"up": 0, "down": 816}}
    assert traffic.counts() == {"a": {"up": 0, "down": 408}}


def test_counts_are_copies() -> None:
    traffic = Traffic()
    traffic.up("a", {"n": 1})
    traffic.counts()["a"]["up"] = 99
    assert traffic.total("up") == 8


def test_fingerprints_follow_content_and_are_computed_once_per_object(monkeypatch: pytest.MonkeyPatch) -> None:
    value, prints = torch.zeros(2), Fingerprints()
    assert prints.of({"a": value, "b": "x"}) == {"a": digest(value), "b": digest("x")}
    monkeypatch.setattr("fedclust.federation.store.digest", lambda value: pytest.fail("computed again"))
    assert prints.of_tensors({"c": value, "n": 3}) == {"c": digest(value)}


def test_interval_bytes_survive_an_export() -> None:
    traffic = Traffic()
    traffic.up("a", {"n": 1})
    assert traffic.since_mark() == {"up": 8, "down": 0}
    traffic.up("a", {"n": 1, "m": 2})
    resumed = Traffic()
    resumed.load(traffic.export())
    assert resumed.since_mark() == traffic.since_mark() == {"up": 16, "down": 0}
    assert traffic.since_mark() == {"up": 0, "down": 0}
