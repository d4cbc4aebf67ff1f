"""What a user of the classifying methods met: wrong directions, clients of another method, mixed privacy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from five_users import LR, fit, method, rows
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

import fedclust
import lightning_modules
from fedclust.directions import better
from fedclust.federation.loop import FederatedLoop
from lightning_modules.classifier import Classifier
from lightning_modules.pa_cfl import PrivateAdaptiveClient

GROUPS = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "callback",
    [EarlyStopping("val/acc_mean"), ModelCheckpoint(monitor="val/acc_mean", mode="min")],
    ids=["stop", "keep"],
)
def test_a_monitor_in_the_wrong_direction_is_refused(callback: Any) -> None:
    client = Classifier("mlp", lr=LR, batch_size=16)
    with pytest.raises(ValueError, match=r"'val/acc_mean' with mode 'min', which selects the worst.*mode to 'max'"):
        fedclust.federate(fedclust.FedAvg(), client, rows(GROUPS, 2), rounds=1, callbacks=[callback], progress=False)


def test_federate_knows_which_direction_of_a_monitor_is_better() -> None:
    client = Classifier("mlp", lr=LR, batch_size=16)
    result = fedclust.federate(
        fedclust.FedAvg(), client, rows(GROUPS, 2), rounds=1, monitor="val/acc_worst", progress=False
    )
    assert result.summary["monitor_mode"] == "max"


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("val/acc", "max"),
        ("val/dbi", "min"),
        ("loss", "min"),
        ("clusters/delta", "max"),
        ("privacy/delta", None),
        ("val/x", None),
    ],
)
def test_directions(metric: str, direction: str | None) -> None:
    assert better(metric) == direction


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        (fedclust.PrivateAdaptiveCFL(), "PrivateAdaptiveClient"),
        (fedclust.FMCL(), "FMCLClient"),
        (fedclust.FLAMECHE(2), "FLAMECHEClient"),
    ],
    ids=["pa_cfl", "fmcl", "flameche"],
)
def test_a_client_of_another_method_is_refused_before_training(algorithm: Any, name: str) -> None:
    client = Classifier("mlp", lr=LR, batch_size=16)
    with pytest.raises(ValueError, match=rf"Classifier is no client of .*asks for .*use lightning_modules.{name}"):
        fedclust.federate(algorithm, client, rows(GROUPS, 2), rounds=1, progress=False)


def test_every_method_names_actions_that_its_client_has() -> None:
    for algorithm, client in (
        (fedclust.PrivateAdaptiveCFL, "PrivateAdaptiveClient"), (fedclust.FMCL, "FMCLClient"),
        (fedclust.FLAMECHE, "FLAMECHEClient"), (fedclust.FedAvg, "Classifier"), (fedclust.LocalOnly, "Classifier"),
    ):  # fmt: skip
        kind = getattr(lightning_modules, client)
        assert algorithm.client_actions
        assert set(algorithm.client_actions) <= set(kind.actions())
        assert algorithm.client_class == f"lightning_modules.{client}"


@pytest.mark.parametrize("private", [True, False])
def test_private_and_unprotected_rounds_do_not_mix(trainer: Any, private: bool) -> None:
    data = rows(GROUPS, 2)
    loop = fit(trainer, method(privacy=private, epsilon=1e6), data, rounds=2)
    other = FederatedLoop(method(privacy=not private, epsilon=1e6), PrivateAdaptiveClient("mlp", lr=LR, batch_size=16))
    other._state = loop.state
    loop.server.context.round = 3
    with pytest.raises(
        ValueError, match=rf"privacy is {str(not private).lower()}, but of the 2 rounds before this one"
    ):
        other.algorithm.round(loop.state, [0, 1, 2, 3], loop.server)


def test_predict_says_what_it_takes(trainer: Any) -> None:
    data = rows(GROUPS, 2)
    result = fedclust.federate(
        fedclust.FedAvg(), Classifier("mlp", lr=LR, batch_size=16), data, rounds=1, progress=False
    )
    for wrong in (data.client(0), (np.zeros((2, 6)), [0, 1])):
        with pytest.raises(ValueError, match=r"a Table such as data.client\(3\).test"):
            result.predict(wrong)
    assert result.class_names == ["0", "1", "2", "3"]
