"""Vectorised: failures are one client's own, what cannot be done is refused by name, nothing is left behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from nets import BODIES, OPTIMIZERS, Net, ask, assert_close
from torch import Tensor, nn

from fedclust.federation.backend import InProcess
from fedclust.federation.errors import ClientError, NonFiniteLossError
from fedclust.federation.vectorised import Vectorised


@pytest.mark.parametrize("trouble", [{"poison": 2}, {"fail": 2}])
def test_a_failing_client_fails_alone_and_by_name(connect: Any, trouble: dict[str, int]) -> None:
    found, expected = (
        connect(kind(on_failure="skip"), Net("BatchNorm")) for kind in (Vectorised, InProcess)
    )  # fmt: skip
    ours, theirs = ask(found, **trouble), ask(expected, **trouble)
    assert list(ours) == [0, 1, 3, 4]
    assert_close(ours, theirs)
    assert [str(failure) for failure in found.failures] == [str(failure) for failure in expected.failures]
    with pytest.raises(ClientError, match="client 2, round 1, action 'learn'") as caught:
        ask(connect(Vectorised(), Net("BatchNorm")), **trouble)
    assert isinstance(caught.value.__cause__, NonFiniteLossError if "poison" in trouble else OSError)


def test_batch_norm_of_a_single_row_fails_for_its_client_only(connect: Any) -> None:
    sizes = (30, 1, 9)
    backend = connect(Vectorised(on_failure="skip"), Net("BatchNorm"), sizes)
    expected = connect(InProcess(on_failure="skip"), Net("BatchNorm"), sizes)
    assert_close(ask(backend), ask(expected))
    assert [failure.client for failure in backend.failures] == [1] == [f.client for f in expected.failures]
    assert "BatchNorm needs more than one value per channel" in str(backend.failures[0])
    # Elsewhere a client of one row is one like any other.
    for body in ("plain", "image BatchNorm", "GroupNorm"):
        assert_close(ask(connect(Vectorised(), Net(body), sizes)), ask(connect(InProcess(), Net(body), sizes)))


@pytest.mark.parametrize(
    ("message", "text"),
    [({"anonymous": True}, r"client 0.*the loss of Net must be a method of the module.*lambda"),
     ({"own_factor": True}, r"client 0 and client 1 cannot train together: the arguments of their loss differ"),
     ({"scales": torch.arange(5)}, r"client 0 and client 1.*set Net\.scale to different values")],
)  # fmt: skip
def test_what_cannot_be_trained_together_is_refused_by_name(connect: Any, message: Any, text: str) -> None:
    with pytest.raises(ClientError, match=text):
        ask(connect(Vectorised(), Net()), **message)
    ask(connect(InProcess(), Net()), **message)


class Sorting(nn.Module):
    """A layer whose shape depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


def test_a_layer_that_cannot_be_vectorised_is_named(connect: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(BODIES, "plain", lambda: nn.Sequential(nn.Linear(6, 6), Sorting()))
    with pytest.raises(ClientError, match=r"Net, layer 'net\.1' \(Sorting\), cannot be trained for several clients"):
        ask(connect(Vectorised(), Net()))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop])
def test_other_optimisers_are_refused_before_training(connect: Any, monkeypatch: Any, kind: Any) -> None:
    monkeypatch.setitem(OPTIMIZERS, "SGD", kind)
    with pytest.raises(ValueError, match=rf"Vectorised cannot train Net: optimiser {kind.__name__}.*element-wise SGD"):
        connect(Vectorised(), Net())


def test_modules_that_draw_and_precisions_with_loss_scales_are_refused(connect: Any, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match=r"16-mixed.*loss scale per client"):
        connect(Vectorised(), Net(), precision="16-mixed")
    monkeypatch.setattr(Net, "draws_in_training", True)
    with pytest.raises(ValueError, match=r"cannot train Net: draws_in_training is not set to False"):
        connect(Vectorised(), Net())
    monkeypatch.setitem(BODIES, "plain", lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)))
    with pytest.raises(ValueError, match=r"cannot train Net: layers \['net\.1'\] draw"):
        connect(Vectorised(), Net())


@pytest.mark.parametrize("value", [0, 1.5, True])
def test_bad_numbers_of_clients_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="clients_per_batch"):
        Vectorised(value)


def test_nothing_is_left_and_the_module_of_the_run_is_untouched(connect: Any) -> None:
    before = set(threading.enumerate())
    backend = connect(Vectorised(2, on_failure="skip"), Net("BatchNorm"))
    weights = backend.module.snapshot()
    ask(backend, fail=3)
    assert set(threading.enumerate()) == before
    assert all(torch.equal(weights[name], value) for name, value in backend.module.snapshot().items())
    with pytest.raises(ClientError):
        ask(connect(Vectorised(2), Net("BatchNorm")), fail=0)
    assert set(threading.enumerate()) == before


def test_copies_are_made_only_for_clients_that_wait_and_dropped_on_closing(connect: Any) -> None:
    backend = connect(Vectorised(3), Net())
    ask(backend, epochs=1)
    assert len(backend._free) == 3
    backend.close()
    assert backend._free == []
    assert_close(ask(backend), ask(connect(InProcess(), Net())))
