"""The two supervised baselines, against an independent computation."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score

from fedclust.algorithms.fedavg import FedAvg
from fedclust.algorithms.local_only import LocalOnly
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import Iid
from fedclust.federation.averaging import weighted_average
from fedclust.federation.backend import InProcess
from fedclust.federation.errors import ClientError, NonFiniteOutputsError
from fedclust.federation.loop import FederatedLoop
from fedclust.scores import accuracy, class_confusion, macro_f1, roc_auc, user_metrics
from lightning_modules.classifier import Classifier


def fit(algorithm: Any, data: Any, trainer: Any, rounds: int = 1) -> FederatedLoop:
    loop = FederatedLoop(algorithm, Classifier("mlp", lr=0.1, batch_size=8))
    trainer(rounds).fit(loop, datamodule=data)
    return loop


def own(loop: FederatedLoop, client: int) -> dict[str, torch.Tensor]:
    state = loop.backend.states.get(client)
    return {name.removeprefix("own/"): torch.as_tensor(v) for name, v in state.items() if name.startswith("own/")}


def test_fedavg_is_the_average_of_what_clients_learn_alone(blobs: Any, trainer: Any) -> None:
    together, alone = fit(FedAvg(), blobs(), trainer), fit(LocalOnly(), blobs(), trainer)
    expected = weighted_average([own(alone, client) for client in range(3)], blobs().n_rows)
    assert together.state.weights.keys() == expected.keys()
    assert all(torch.equal(together.state.weights[name], expected[name]) for name in expected)


def test_local_models_stay_with_the_clients(blobs: Any, trainer: Any) -> None:
    loop = fit(LocalOnly(), blobs(), trainer, rounds=2)
    sent = sum(both["up"] for action, both in loop.byte_counts().items() if action == "update_own")
    assert sent == 2 * 3 * 3 * 8
    assert not torch.equal(own(loop, 0)["network.1.weight"], own(loop, 1)["network.1.weight"])


def test_blobs_are_learnt(blobs: Any, trainer: Any) -> None:
    loop = fit(FedAvg(round_epochs=5), blobs(), trainer, rounds=3)
    assert loop.latest["val/acc_mean"] == 1.0
    assert loop.latest["val/auc"] == 1.0


def test_labels_are_needed(blobs: Any, trainer: Any) -> None:
    with pytest.raises(ValueError, match="Classifier needs labels"):
        fit(FedAvg(), blobs(labels=False), trainer)


def test_scores_equal_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    true, pred = torch.from_numpy(rng.integers(0, 4, 60)), torch.from_numpy(rng.integers(0, 4, 60))
    confusion = class_confusion(true, pred, 5)
    assert accuracy(confusion) == pytest.approx(float((true == pred).float().mean()))
    assert macro_f1(confusion) == pytest.approx(f1_score(true, pred, average="macro"))
    scores = torch.from_numpy(rng.dirichlet(np.ones(4), 60))
    expected = roc_auc_score(true, scores, multi_class="ovr", average="macro")
    assert roc_auc(true, scores) == pytest.approx(expected)


def test_the_area_is_undefined_for_one_class_and_left_out() -> None:
    assert roc_auc(torch.zeros(5, dtype=torch.int64), torch.full((5, 2), 0.5)) is None
    both = torch.tensor([[1, 0], [1, 2]])
    metrics = user_metrics(
        [both, torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[1, 1], [0, 0]])], [0.9, None, None]
    )
    assert metrics == {
        "acc_mean": pytest.approx(0.625),
        "acc_worst": 0.5,
        "acc_pooled": pytest.approx(4 / 6),
        "f1_macro": pytest.approx((macro_f1(both) + 1 / 3) / 2),
        "f1_worst": pytest.approx(1 / 3),
        "auc": 0.9,
        "auc_worst": 0.9,
        "auc_users": 1.0,
    }
    with pytest.raises(ValueError, match="no client has a row"):
        user_metrics([torch.zeros(2, 2, dtype=torch.int64)], [None])


@pytest.mark.parametrize(
    ("network", "shape", "parameters"),
    [("cnn", (1, 28, 28), 582_026), ("lenet5", (1, 28, 28), 61_706), ("resnet10", (3, 32, 32), 4_910_922)],
)
def test_networks_have_the_papers_sizes(network: Any, shape: tuple[int, ...], parameters: int) -> None:
    client = Classifier(network)
    client.build(shape, 10)
    assert sum(p.numel() for p in client.parameters()) == parameters
    assert client(torch.rand(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize(("network", "shape"), [("cnn", (1, 8, 8)), ("resnet10", (1, 28, 28)), ("small_cnn", (64,))])
def test_networks_refuse_rows_that_they_cannot_take(network: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="images"):
        Classifier(network).build(shape, 10)


@pytest.mark.parametrize("mode", ["secure_sum", "ckks"])
def test_protected_sums_give_the_same_model_and_show_no_clients_weights(
    mode: str, blobs: Any, trainer: Any, monkeypatch: Any
) -> None:
    if mode == "ckks":
        pytest.importorskip("tenseal")
    plain = fit(FedAvg(), blobs(), trainer, rounds=2)
    seen: list[str] = []
    original = InProcess._accept

    def accept(self: Any, outcome: Any) -> Any:
        seen.extend(name for reply in outcome.replies.values() for name in reply)
        return original(self, outcome)

    monkeypatch.setattr(InProcess, "_accept", accept)
    protected = fit(FedAvg(aggregation=mode), blobs(), trainer, rounds=2)
    for name, value in plain.state.weights.items():
        assert torch.allclose(protected.state.weights[name], value, atol=1e-4 if mode == "ckks" else 1e-6)
    assert not any(name.startswith("weights/") for name in seen)


def test_who_drops_out_of_the_sum_is_in_neither_sum_nor_count(blobs: Any, trainer: Any, monkeypatch: Any) -> None:
    """Client 1 leaves after the masks were exchanged: the model is the average of clients 0 and 2."""
    original = Classifier.contribute_weights

    def contribute(self: Any, message: Any, ctx: Any) -> Any:
        if ctx.id == 1 and message["step"] == "input":
            raise OSError("gone")
        return original(self, message, ctx)

    contribute.__fedclust_action__ = True
    monkeypatch.setattr(Classifier, "contribute_weights", contribute)
    alone = fit(LocalOnly(), blobs(), trainer)
    expected = weighted_average([own(alone, client) for client in (0, 2)], [blobs().n_rows[c] for c in (0, 2)])
    loop = FederatedLoop(
        FedAvg(aggregation="secure_sum"), Classifier("mlp", lr=0.1, batch_size=8), InProcess(on_failure="skip")
    )
    trainer(1).fit(loop, datamodule=blobs())
    for name, value in expected.items():
        assert torch.allclose(loop.state.weights[name], value, atol=1e-6)


def test_too_small_a_bound_names_the_client(blobs: Any, trainer: Any) -> None:
    """With large steps some weight grows beyond 1, and so rows times weight beyond the number of rows."""
    data = blobs()
    largest = max(fit(FedAvg(), data, trainer).backend.data.n_rows)
    loop = FederatedLoop(
        FedAvg(round_epochs=5, aggregation="secure_sum", sum_bound=largest), Classifier("mlp", lr=3.0, batch_size=8)
    )
    with pytest.raises(ClientError, match=rf"client \d+.*lies outside the bound ±{largest}"):
        trainer(1).fit(loop, datamodule=data)


def test_sums_that_cannot_work_are_refused_before_training(blobs: Any, trainer: Any) -> None:
    with pytest.raises(ValueError, match=r"sum_bound must be at least the number of rows.*rows of client \d"):
        fit(FedAvg(aggregation="secure_sum", sum_bound=0.5), blobs(), trainer)
    one = FederatedDataModule((np.eye(4, dtype=np.float32), np.arange(4)), Iid(1), seed=0)
    with pytest.raises(ValueError, match="at least 2 clients"):
        fit(FedAvg(aggregation="secure_sum"), one, trainer)
    with pytest.raises(ValueError, match="aggregation"):
        FedAvg(aggregation="sum")


def test_rounds_of_one_client_cannot_have_protected_sums(blobs: Any, trainer: Any) -> None:
    loop = FederatedLoop(FedAvg(aggregation="secure_sum"), Classifier("mlp"), cohort_size=1)
    with pytest.raises(ValueError, match="at least 2 clients in a round; cohort_size or participation give 1 of"):
        trainer(1).fit(loop, datamodule=blobs())


def test_a_sum_of_too_few_keeps_the_model_with_a_note(blobs: Any, trainer: Any, monkeypatch: Any) -> None:
    original = Classifier.contribute_weights

    @functools.wraps(original)
    def contribute(self: Any, message: Any, ctx: Any) -> Any:
        if ctx.round == 2 and message["step"] == "input":
            raise OSError("gone")
        return original(self, message, ctx)

    monkeypatch.setattr(Classifier, "contribute_weights", contribute)

    def fit_rounds(rounds: int) -> FederatedLoop:
        client = Classifier("mlp", lr=0.1, batch_size=8)
        loop = FederatedLoop(FedAvg(aggregation="secure_sum"), client, InProcess(on_failure="skip"))
        trainer(rounds, folder=f"to{rounds}").fit(loop, datamodule=blobs())
        return loop

    one, two = fit_rounds(1), fit_rounds(2)
    assert all(torch.equal(value, two.state.weights[name]) for name, value in one.state.weights.items())
    assert any(note.startswith("round 2: the model stays as it was") for note in two.notes)


def test_a_bound_too_small_for_encryption_is_refused() -> None:
    pytest.importorskip("tenseal")
    with pytest.raises(ValueError, match="sum_bound must lie between"):
        FedAvg(aggregation="ckks", sum_bound=1e-300)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_whose_outputs_are_not_finite_is_not_measured(blobs: Any, trainer: Any, value: float) -> None:
    """Whatever the classes of the rows are: the area under the ROC, which would notice, needs two of them."""
    loop = fit(LocalOnly(), blobs(), trainer)
    state = loop.backend.states.get(1)
    bias = next(name for name in state if name.startswith("own/") and name.endswith("bias"))
    loop.backend.states.put(1, {**state, bias: torch.full_like(torch.as_tensor(state[bias]), value)})
    message = r"client 1, round 1, action 'evaluate_own': .*client 1, round 1: the model's outputs are not finite on "
    rows = len(loop.backend.data.client(1).val)
    with pytest.raises(ClientError, match=rf"{message}{rows} of {rows} rows") as caught:
        loop.algorithm.evaluate(loop.state, loop.server, "val")
    assert isinstance(caught.value.__cause__, NonFiniteOutputsError)
