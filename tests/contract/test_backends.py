"""Cases that every backend must pass; a new backend is one line in BACKENDS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fedclust.federation.backend import Backend, InProcess
from fedclust.federation.errors import ClientError, RoundFailedError
from fedclust.federation.processes import Processes
from fedclust.federation.vectorised import Vectorised

BACKENDS: dict[str, Callable[..., Backend]] = {
    "InProcess": InProcess,
    "Processes": Processes,
    "Vectorised": Vectorised,
}
SIZES = (4, 6, 8, 10)

pytestmark = pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)


@pytest.fixture
def connected(toy: Any, blobs: Any) -> Iterator[Callable[..., Backend]]:
    """A backend over four clients of the toy module, in round 3."""
    made: list[Backend] = []

    def connect(make: Callable[..., Backend], **options: Any) -> Backend:
        data = blobs(SIZES, val_fraction=0.0, test_fraction=0.0)
        module = toy.client()
        module.build(data.input_shape, data.n_classes)
        backend = make(**options)
        backend.connect(module, data, seed=5, device=torch.device("cpu"), precision="32-true")
        backend.round = 3
        made.append(backend)
        return backend

    yield connect
    for backend in made:
        backend.close()


def everyone(**message: Any) -> dict[int, dict[str, Any]]:
    return {client: dict(message) for client in (2, 0, 3, 1)}


W = torch.zeros(6)


def pulled(backend: Backend, client: int) -> torch.Tensor:
    """One step of gradient descent with rate 1/4 on the mean squared distance, from w = 0."""
    return 0.25 * 2 * backend.data.client(client).train.x.mean(0)


def test_replies_come_by_client_and_belong_to_them(make: Any, connected: Any) -> None:
    backend = connected(make)
    replies = backend.ask("pull", everyone(), shared={"w": W})
    assert list(replies) == [0, 1, 2, 3]
    for client, reply in replies.items():
        assert reply["n_rows"] == SIZES[client]
        assert torch.allclose(reply["w"], pulled(backend, client), atol=1e-6)


def test_own_messages_reach_their_client_only(make: Any, connected: Any) -> None:
    backend = connected(make)
    replies = backend.ask("pull", {1: {"w": W}, 2: {"w": W + 1}})
    assert torch.allclose(replies[1]["w"], pulled(backend, 1), atol=1e-6)
    assert torch.allclose(replies[2]["w"], pulled(backend, 2) + 0.5, atol=1e-6)


def test_several_actions_in_one_trip_share_message_and_state(make: Any, connected: Any) -> None:
    replies = connected(make).ask(["pull", "recall"], everyone(), shared={"w": W})
    for client, reply in replies.items():
        assert reply.keys() == {"w", "n_rows", "n_steps", "rounds", "me"}
        assert reply["me"] == client
        assert reply["rounds"].tolist() == [3]


def test_on_reply_is_called_in_client_order_and_nothing_is_kept(make: Any, connected: Any) -> None:
    seen: list[tuple[int, int]] = []
    backend = connected(make)
    assert backend.ask("recall", everyone(), on_reply=lambda client, reply: seen.append((client, reply["me"]))) == {}
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("budget", [None, 0])
def test_state_is_kept_between_rounds_also_while_a_client_is_away(make: Any, connected: Any, budget: float) -> None:
    backend = connected(make, state_budget_mb=budget)
    for number, clients in ((1, [0, 1]), (2, [1]), (3, [0, 1])):
        backend.round = number
        backend.ask("pull", {client: {} for client in clients}, shared={"w": W})
    replies = backend.ask("recall", everyone())
    assert [reply["rounds"].tolist() for reply in replies.values()] == [[1, 3], [1, 2, 3], [], []]


def test_connecting_again_forgets_the_former_run(make: Any, connected: Any) -> None:
    backend = connected(make, on_failure="skip")
    backend.ask("pull", everyone(), shared={"w": W})
    backend.ask("spoil", everyone(), shared={"fail": torch.tensor([1])})
    backend.connect(backend.module, backend.data, seed=5, device=torch.device("cpu"), precision="32-true")
    assert backend.traffic.counts() == {}
    assert backend.failures == []
    assert backend.ask("recall", {0: {}})[0]["rounds"].tolist() == []


@pytest.mark.parametrize(
    ("actions", "to", "shared", "text"),
    [
        ("dance", {0: {}}, {}, r"ToyClient has no action \['dance'\].*pull"),
        (["recall", "training_step"], {0: {}}, {}, "training_step"),
        ([], {0: {}}, {}, "has no action"),
        (["recall", "recall"], {0: {}}, {}, "once per trip"),
        ("recall", {}, {}, "'recall' was asked of no client"),
        ("recall", {0: {}, 4: {}}, {}, r"clients \[4\] do not exist; ids are 0..3"),
        ("recall", {-1: {}}, {}, r"clients \[-1\] do not exist"),
        ("pull", {0: {}, 2: {"w": W}}, {"w": W}, r"\['w'\].*client 2"),
    ],
)
def test_wrong_questions_are_refused_before_anyone_works(
    make: Any, connected: Any, actions: Any, to: Any, shared: Any, text: str
) -> None:
    backend = connected(make)
    with pytest.raises(ValueError, match=text):
        backend.ask(actions, to, shared=shared)
    assert backend.traffic.counts() == {}


def test_messages_of_other_types_are_refused(make: Any, connected: Any) -> None:
    backend = connected(make)
    with pytest.raises(TypeError, match=r"'w' is a list"):
        backend.ask("pull", {0: {"w": [0.0]}})
    with pytest.raises(TypeError, match=r"'w' is a dict"):
        backend.ask("pull", {0: {}}, shared={"w": {}})
    with pytest.raises(ClientError, match=r"client 1, round 3, action 'odd_reply': TypeError.*'nested' is a dict"):
        backend.ask("odd_reply", {1: {}})


def test_raise_names_client_round_and_action_and_keeps_the_cause(make: Any, connected: Any) -> None:
    backend = connected(make)
    backend.ask("pull", everyone(), shared={"w": W})
    with pytest.raises(ClientError) as caught:
        backend.ask(["recall", "spoil"], everyone(), shared={"fail": torch.tensor([2, 3])})
    assert str(caught.value) == "client 2, round 3, action 'spoil': ZeroDivisionError: no luck for 2"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in spoil" in caught.value.failure.traceback
    assert [failure.client for failure in backend.failures] == [2]


@pytest.mark.parametrize("budget", [None, 0])
def test_skip_goes_on_and_leaves_the_failed_clients_state_as_it_was(make: Any, connected: Any, budget: Any) -> None:
    backend = connected(make, on_failure="skip", state_budget_mb=budget)
    backend.ask("pull", everyone(), shared={"w": W})
    seen: list[int] = []
    backend.ask(
        "spoil", everyone(), shared={"fail": torch.tensor([1, 3])}, on_reply=lambda client, _: seen.append(client)
    )
    assert seen == [0, 2]
    assert [(f.client, f.round, f.action) for f in backend.failures] == [(1, 3, "spoil"), (3, 3, "spoil")]
    states = [backend.states.get(client) for client in range(4)]
    assert [state["rounds"].tolist() for state in states] == [[0], [3], [0], [3]]
    assert ["extra" in state for state in states] == [True, False, True, False]


def test_a_failure_in_the_second_action_drops_the_whole_trip_of_that_client(make: Any, connected: Any) -> None:
    backend = connected(make, on_failure="skip")
    backend.ask("pull", everyone(), shared={"w": W})
    backend.round = 4
    replies = backend.ask(["pull", "spoil"], everyone(), shared={"w": W, "fail": torch.tensor([0])})
    assert list(replies) == [1, 2, 3]
    assert backend.states.get(0)["rounds"].tolist() == [3]
    assert backend.states.get(1)["rounds"].tolist() == [0, 0]


def test_all_failed_stops_at_either_policy(make: Any, connected: Any) -> None:
    backend = connected(make, on_failure="skip")
    with pytest.raises(
        RoundFailedError, match=r"all 4 clients.*client 0, round 3, action 'pull'.*and 1 more"
    ) as caught:
        backend.ask("pull", everyone())
    assert [failure.client for failure in caught.value.failures] == [0, 1, 2, 3]
    with pytest.raises(RoundFailedError, match=r"all 1 clients"):
        backend.ask("pull", {2: {}})


def test_two_actions_with_one_reply_name_are_refused(make: Any, connected: Any) -> None:
    with pytest.raises(ClientError, match=r"action 'recall'.*repeats the reply names \['me', 'rounds'\]"):
        connected(make).ask(["echo", "recall"], {0: {}})


def test_bytes_are_counted_per_action_and_shared_values_once(make: Any, connected: Any) -> None:
    backend = connected(make)
    backend.ask(["pull", "recall"], everyone(own=1), shared={"w": W})
    # down: 24 bytes of w and 8 of a number to each; up: w, two numbers; one int64 and one number.
    assert backend.traffic.counts() == {"pull": {"up": 4 * 40, "down": 4 * 32}, "recall": {"up": 4 * 16, "down": 0}}
    backend.ask("pull", everyone(own=1), shared={"w": W.clone()})
    assert backend.traffic.counts()["pull"] == {"up": 8 * 40, "down": 4 * 32 + 4 * 8}


def test_tensors_sent_to_one_client_count_once_too(make: Any, connected: Any) -> None:
    backend = connected(make)
    for expected in (4 * 24, 4 * 24):
        backend.ask("pull", everyone(w=W))
        assert backend.traffic.counts()["pull"]["down"] == expected
    backend.ask("pull", {1: {"w": W + 1}, 2: {"w": W}})
    assert backend.traffic.counts()["pull"]["down"] == 5 * 24
    backend.ask("pull", {1: {"w": W}})
    assert backend.traffic.counts()["pull"]["down"] == 6 * 24


def test_threads_are_set_for_the_work_and_put_back(make: Any, connected: Any) -> None:
    backend = connected(make, threads=2)
    before = torch.get_num_threads()
    assert backend.ask("threads", {0: {}})[0]["threads"] == 2
    assert torch.get_num_threads() == before == 1


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"threads": True}, {"threads": 1.0}, {"on_failure": "ignore"}, {"state_budget_mb": -1}]
)
def test_bad_options_are_refused(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"threads|on_failure|budget"):
        make(**options)


def test_secrets_stay_in_memory_and_a_failed_trip_leaves_them_as_they_were(make: Any, connected: Any) -> None:
    backend = connected(make, on_failure="skip", state_budget_mb=0)
    for fail, expected in ((False, [0, 0, 0, 0]), (True, [1, 1, 1]), (False, [2, 1, 2, 2])):
        replies = backend.ask("whisper", everyone(), shared={"fail": fail})
        assert [reply["known"] for reply in replies.values()] == expected
    assert b"key" not in b"".join(backend.states.export().values())
    backend.connect(backend.module, backend.data, seed=5, device=torch.device("cpu"), precision="32-true")
    assert [reply["known"] for reply in backend.ask("whisper", everyone(), shared={"fail": False}).values()] == [0] * 4
