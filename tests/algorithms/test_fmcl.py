"""FMCL: groups from signatures, a model per group, clients that come later."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

import fedclust
from fedclust.algorithms.fmcl import FMCL
from fedclust.clustering.signatures import Signature, signature_distances
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import LabelGroups
from fedclust.federation.averaging import weighted_average
from fedclust.federation.backend import InProcess
from fedclust.federation.loop import FederatedLoop
from lightning_modules.fmcl import FMCLClient

GROUPS = [[0, 1], [2, 3], [4, 5]]


def data(per_group: int = 3, groups: list[list[int]] = GROUPS, seed: int = 0) -> FederatedDataModule:
    rng = np.random.default_rng(1)
    y = np.arange(360) % 6
    x = (np.eye(6)[y] * 0.8 + rng.normal(0.1, 0.03, (360, 6))).clip(0, 1).astype(np.float32)
    held = np.isin(y, [label for group in groups for label in group])
    return FederatedDataModule((x[held], y[held]), LabelGroups(groups, per_group), seed=seed)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("FEDCLUST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(trainer: Any) -> Callable[..., FederatedLoop]:
    def start(algorithm: FMCL | None = None, rounds: int = 1, folder: str = "run", **options: Any) -> FederatedLoop:
        module = options.pop("data", None) or data()
        loop = FederatedLoop(algorithm or FMCL(), FMCLClient(network="mlp", lr=0.1, batch_size=16), **options)
        trainer(rounds, folder=folder).fit(loop, datamodule=module)
        return loop

    return start


def test_planted_groups_are_found_before_training_and_the_curve_is_told(run: Any) -> None:
    loop = run()
    assert loop.latest["clients/ari"] == 1.0
    assert loop.latest["clusters/final"] == 3.0
    assert [int(k) for k, _ in loop.state.curve] == [2, 3, 4, 5]
    assert float(loop.state.curve[:, 1].argmax()) == 1
    assert any(note.startswith("K = 3; silhouette by K: 2: 0.") for note in loop.notes)


def test_a_run_writes_the_curve_and_three_figures_per_client(tmp_path: Any) -> None:
    client = FMCLClient(network="mlp", lr=0.1, batch_size=16)
    result = fedclust.federate(
        FMCL(), client, data(), rounds=1, monitor="val/f1_worst", progress=False, directory=tmp_path / "run"
    )
    with (tmp_path / "run" / "curve.csv").open() as file:
        curve = [(int(row["clusters"]), float(row["silhouette"])) for row in csv.DictReader(file)]
    assert curve == [(int(k), score) for k, score in result.state.curve.tolist()]
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "run" / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name, mean, worst in (("acc", "acc_mean", "acc_worst"), ("f1", "f1_macro", "f1_worst")):
        values = [float(row[f"test_{name}"]) for row in rows]
        assert result.metrics[f"test/{mean}"] == pytest.approx(np.mean(values))
        assert result.metrics[f"test/{worst}"] == pytest.approx(min(values))
    areas = [float(row["test_auc"]) for row in rows if row["test_auc"]]
    assert result.metrics["test/auc_users"] == len(areas) == 9
    assert result.metrics["test/auc_worst"] == pytest.approx(min(areas))
    with pytest.raises(ValueError, match="f1_wurst"):
        fedclust.federate(FMCL(), client, data(), rounds=1, monitor="val/f1_wurst", progress=False)


def test_grouping_costs_one_message_and_rounds_cost_no_more_of_it(run: Any) -> None:
    """Per client: 2 classes as int64, 2 means of 6 float32, 2 float64 shares."""
    one, three = run().byte_counts(), run(rounds=3, folder="three").byte_counts()
    assert one["describe_classes"] == three["describe_classes"] == {"up": 9 * (16 + 48 + 16), "down": 0}


def test_distances_are_those_of_the_signatures(run: Any) -> None:
    loop = run()
    told = [FMCL.signature_of(loop.state, client, {}) for client in range(9)]
    signatures = [Signature(one["classes"], one["means"], one["weights"]) for one in told]
    expected = signature_distances(signatures).distances
    assert np.allclose(loop.state.distances.numpy(), expected)
    means = torch.stack([table.x[table.y == 0].mean(0) for table in [loop.backend.data.client(0).train]])
    assert torch.allclose(signatures[0].means[:1], means, atol=1e-6)


def test_a_round_is_fedavg_inside_every_group(run: Any) -> None:
    """Against local training of every client alone, averaged by rows in its group."""
    loop = run()
    clusters = loop.state.clusters
    alone = run(FMCL(n_clusters=9), folder="alone")
    assert alone.state.clusters.tolist() == list(range(9))
    sizes = loop.backend.data.n_rows
    for cluster in range(3):
        members = torch.nonzero(clusters == cluster).flatten().tolist()
        states = [{name: values[member] for name, values in alone.state.models.items()} for member in members]
        expected = weighted_average(states, [sizes[member] for member in members])
        for name, value in expected.items():
            assert torch.equal(loop.state.models[name][cluster], value)


def test_groups_without_participants_keep_their_model(run: Any) -> None:
    loop = run(cohort_size=1)
    trained = loop.cohorts.draw(loop.server.clients, 0, 1)
    cluster = int(loop.state.clusters[trained[0]])
    for name, values in loop.state.models.items():
        kept = [torch.equal(values[k], loop.state.initial[name]) for k in range(3)]
        assert kept == [k != cluster for k in range(3)]


def test_who_could_not_be_described_is_in_no_group_and_trains_none(run: Any, monkeypatch: Any) -> None:
    trained: list[int] = []
    describe, update = FMCLClient.describe_classes, FMCLClient.update

    @functools.wraps(describe)
    def fails(self: Any, message: Any, ctx: Any) -> Any:
        if ctx.id == 4:
            raise OSError("gone")
        return describe(self, message, ctx)

    @functools.wraps(update)
    def noted(self: Any, message: Any, ctx: Any) -> Any:
        trained.append(ctx.id)
        return update(self, message, ctx)

    monkeypatch.setattr(FMCLClient, "describe_classes", fails)
    monkeypatch.setattr(FMCLClient, "update", noted)
    loop = run(backend=InProcess(on_failure="skip"))
    assert loop.state.clusters[4] == -1
    assert trained == [0, 1, 2, 3, 5, 6, 7, 8]


def test_a_new_client_joins_without_training_and_gets_its_groups_model() -> None:
    result = fedclust.federate(
        FMCL(round_epochs=5), FMCLClient(network="mlp", lr=0.5, batch_size=16), data(), rounds=4, progress=False
    )
    for number, group in enumerate(GROUPS):
        x = np.repeat(np.eye(6)[group], 4, axis=0) * 0.8 + 0.1
        y = np.repeat(group, 4)
        cluster = result.assign((x, y))
        assert cluster == result.assignments[3 * number]
        assert result.predict(x, cluster=cluster).tolist() == y.tolist()
        assert result.predict(x, client=3 * number).tolist() == y.tolist()
    with pytest.raises(ValueError, match="no cluster 3"):
        result.predict(x, cluster=3)
    with pytest.raises(ValueError, match="not both"):
        result.predict(x, client=0, cluster=0)
    assert result.signature(0)["classes"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="no client 9"):
        result.signature(9)


@pytest.mark.parametrize(("clients", "text"), [(1, "1 clients are too few"), (2, "2 clients are too few")])
def test_few_clients_are_one_group_with_the_reason(run: Any, clients: int, text: str) -> None:
    loop = run(data=data(clients, [[0, 1, 2, 3, 4, 5]]))
    assert loop.state.clusters.tolist() == [0] * clients
    assert any(text in note for note in loop.notes)


def test_identical_clients_are_one_group(run: Any) -> None:
    x, y = np.eye(3, dtype=np.float32), np.arange(3)
    loop = run(data=FederatedDataModule([(x, y)] * 4, seed=0, val_fraction=0.0, test_fraction=0.0))
    assert loop.state.clusters.tolist() == [0, 0, 0, 0]
    assert any("all distances are equal to 0" in note for note in loop.notes)


def test_clients_of_one_class_each_share_nothing(run: Any) -> None:
    x, y = np.eye(4, dtype=np.float32), np.arange(4)
    clients = [(np.repeat(x[c : c + 1], 3, 0), np.repeat(y[c], 3)) for c in range(4)]
    loop = run(data=FederatedDataModule(clients, seed=0, val_fraction=0.0, test_fraction=0.0))
    assert loop.state.clusters.tolist() == [0] * 4
    assert any("no two clients share a class" in note for note in loop.notes)


def test_fixed_numbers_of_clusters(run: Any) -> None:
    assert run(FMCL(n_clusters=1)).latest["clusters/final"] == 1.0
    loop = run(FMCL(n_clusters=3), folder="three")
    assert adjusted_rand_score(np.repeat(range(3), 3), loop.state.clusters) == 1.0
    with pytest.raises(ValueError, match="n_clusters is 10, but only 9 clients"):
        run(FMCL(n_clusters=10), folder="ten")


@pytest.mark.parametrize(
    "changes",
    [{"n_clusters": 0}, {"far_factor": 0.5}, {"far_percentile": 0}, {"far_percentile": 101}, {"round_epochs": -1}],
)
def test_bad_arguments_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        FMCL(**changes)


class Doubler:
    """A frozen encoder of known features."""

    seen = 0

    def __init__(self, factor: float = 2.0) -> None:
        self.init_args = {"factor": factor}

    @property
    def fingerprint(self) -> str:
        return f"times {self.init_args['factor']}"

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        type(self).seen += len(x)
        return self.init_args["factor"] * x[:, :3]


def test_an_encoder_makes_the_signature_and_is_neither_trained_nor_exchanged(tmp_path: Any) -> None:
    client = FMCLClient(Doubler(3.0), network="mlp", lr=0.1, batch_size=16)
    result = fedclust.federate(FMCL(), client, data(), rounds=1, progress=False)
    table = data().client(0).train
    assert torch.allclose(
        torch.as_tensor(result.signature(0)["means"])[0], 3 * table.x[table.y == 0][:, :3].mean(0), atol=1e-6
    )
    assert all("encoder" not in name for name in result.state.models)
    loaded = fedclust.load(result.save(tmp_path / "result.pt"))
    assert loaded.module._encoder[0].init_args == {"factor": 3.0}
    assert loaded.assign(data().client(4)) == result.assignments[4]


def test_rows_pass_through_the_encoder_once_and_the_cache_changes_nothing(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Doubler, "seen", 0)
    rows = sum(len(data().client(client).train) for client in range(9))

    def told(factor: float, cache_dir: str | None) -> list[dict[str, Any]]:
        client = FMCLClient(Doubler(factor), network="mlp", lr=0.1, batch_size=16, cache_dir=cache_dir)
        result = fedclust.federate(FMCL(round_epochs=0), client, data(), rounds=1, progress=False)
        return [result.signature(client) for client in range(9)]

    def equal(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
        return all(torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a)

    without = told(2.0, None)
    assert not (tmp_path / "cache").exists()
    assert Doubler.seen == rows
    first, again, own = told(2.0, "auto"), told(2.0, "auto"), told(2.0, str(tmp_path / "own"))
    assert Doubler.seen == 3 * rows
    assert len(list((tmp_path / "cache").iterdir())) == len(list((tmp_path / "own").iterdir())) == 9
    assert equal(first, without)
    assert equal(again, without)
    assert equal(own, without)
    assert not equal(told(3.0, "auto"), without)


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"encode": abs}, r"encoder Own lacks fingerprint, a property .*; init_args, a dict of the plain arguments"),
        ({"encode": abs, "fingerprint": "own"}, r"encoder Own lacks init_args, a dict .*checkpoints name it by them$"),
        ({"fingerprint": "own", "init_args": {}}, r"encoder Own lacks encode\(x\), the features .*float32$"),
        ({"encode": abs, "fingerprint": "own", "init_args": [1]}, "needs init_args, a dict .*; here it is a list"),
        (
            {"encode": abs, "fingerprint": "own", "init_args": {"layers": {1, 2}}},
            "needs init_args.*here argument 'layers' is a set",
        ),
        ({}, "must be an encoder such as those of lightning_modules.encoders, got"),
    ],
)
def test_an_encoder_that_no_checkpoint_could_name_is_refused_at_once(attributes: dict[str, Any], text: str) -> None:
    own = type("Own", (), attributes)
    with pytest.raises(ValueError, match=text):
        FMCLClient(own(), network="mlp")
    with pytest.raises(ValueError, match=r"not the class Doubler: write Doubler\(\)"):
        FMCLClient(Doubler, network="mlp")  # type: ignore[arg-type]


def test_a_file_cannot_have_any_class_called_as_an_encoder(tmp_path: Any) -> None:
    client = FMCLClient(Doubler(), network="mlp", lr=0.1, batch_size=16)
    path = fedclust.federate(FMCL(), client, data(), rounds=1, progress=False).save(tmp_path / "result.pt")
    saved = torch.load(path, weights_only=True)
    mark = tmp_path / "called"
    saved["fedclust"]["client_args"]["encoder"] = {
        "class_path": "subprocess.Popen", "init_args": {"args": f"touch {mark}", "shell": True}
    }  # fmt: skip
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"subprocess\.Popen is no encoder"):
        fedclust.load(path)
    assert not mark.exists()
