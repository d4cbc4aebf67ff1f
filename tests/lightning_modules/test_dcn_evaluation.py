"""What a DCN reports: its sums give scikit-learn's metrics on the pooled rows; and the central DCN under a Trainer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from sklearn.metrics import adjusted_rand_score, davies_bouldin_score, normalized_mutual_info_score

from fedclust.clustering.statistics import DISPERSION, add_statistics, cluster_means, metrics_from_statistics
from fedclust.metrics import clustering_accuracy
from lightning_modules.dcn import DCN
from lightning_modules.dcn_plan import LossWeights


@pytest.fixture
def ready(dcn: Any, blobs: Any) -> tuple[DCN, Any]:
    module, data = dcn(), blobs((40, 3, 25))
    module.build(data.input_shape, data.n_classes)
    module.initialize(1)
    module.cluster_rows(data.train.x, seed=0)
    return module, data


def _silhouette(z: np.ndarray, labels: np.ndarray, means: dict[int, np.ndarray]) -> float:
    """The simplified silhouette, row by row from its definition."""
    scores = []
    for row, own in zip(z, labels.tolist(), strict=True):
        a = np.linalg.norm(row - means[own])
        b = min(np.linalg.norm(row - mean) for k, mean in means.items() if k != own)
        scores.append(0.0 if (labels == own).sum() == 1 else (b - a) / max(a, b))
    return float(np.mean(scores))


def test_actions_of_all_clients_give_scikit_learns_values(ready: Any, context: Any) -> None:
    module, data = ready
    weights = {f"weights/{name}": value for name, value in module.snapshot().items()}
    message = {**weights, "centers": module.centers.clone(), "split": "train"}
    contexts = [context(data.client(client).train) for client in range(3)]
    replies = [module.evaluate(message, ctx) for ctx in contexts]
    assert all(reply.keys() == {"n", "recon_sum", "counts", "sums", "square_sum", "contingency"} for reply in replies)

    total = add_statistics(replies)
    message |= {"means": cluster_means(total), "counts": total["counts"]}
    answers = [module.disperse(message, ctx) for ctx in contexts]
    metrics = metrics_from_statistics(total, {name: sum(answer[name] for answer in answers) for name in DISPERSION})
    x, y = data.train.x, data.train.y
    z, labels = module.latents(x).double(), module.assignments(x)[0]
    assert metrics["dbi"] == pytest.approx(davies_bouldin_score(z, labels), abs=1e-6)
    means = {k: z[labels == k].mean(0) for k in set(labels.tolist())}
    decoded = {k: module.decode_rows(mean.float()[None])[0].double().numpy() for k, mean in means.items()}
    latent = _silhouette(z.numpy(), labels.numpy(), {k: mean.numpy() for k, mean in means.items()})
    assert metrics["silhouette"] == pytest.approx(latent, abs=1e-9)
    rows = _silhouette(x.flatten(1).double().numpy(), labels.numpy(), decoded)
    assert metrics["silhouette_input"] == pytest.approx(rows, abs=1e-6)
    assert metrics["acc"] == pytest.approx(clustering_accuracy(y, labels), abs=1e-6)
    assert metrics["nmi"] == pytest.approx(normalized_mutual_info_score(y, labels), abs=1e-6)
    assert metrics["ari"] == pytest.approx(adjusted_rand_score(y, labels), abs=1e-6)
    error = (module.decode_rows(module.latents(x)) - x).square().mean()
    assert metrics["recon"] == pytest.approx(float(error), rel=1e-5)


def test_a_split_without_rows_gives_zeros(ready: Any, context: Any) -> None:
    module, data = ready
    weights = {f"weights/{name}": value for name, value in module.snapshot().items()}
    message = {**weights, "centers": module.centers.clone(), "split": "val"}
    message |= {"means": torch.zeros(3, 2), "counts": torch.zeros(3, dtype=torch.int64)}
    ctx = context(data.client(0).train)
    reply = module.evaluate(message, ctx)
    assert all(float(torch.as_tensor(value, dtype=torch.float64).abs().sum()) == 0 for value in reply.values())
    assert reply["contingency"].shape == (3, 3)
    answer = module.disperse(message, ctx)
    assert answer.keys() == {*DISPERSION}
    assert all(float(value.abs().sum()) == 0 for value in answer.values())
    assert all(len(value) == 0 for value in module.assign(message, ctx).values())


def test_assign(ready: Any, context: Any) -> None:
    module, data = ready
    weights = {f"weights/{name}": value for name, value in module.snapshot().items()}
    table = data.client(2).train
    reply = module.assign({**weights, "centers": module.centers.clone(), "split": "train"}, context(table))
    labels, distances = module.assignments(table.x)
    assert reply["rows"].tolist() == table.rows.tolist()
    assert torch.equal(reply["cluster"], labels)
    assert torch.equal(reply["distance"], distances)


# -- central training ----------------------------------------------------------------------------------------------


def central(**changes: Any) -> DCN:
    settings = {"n_clusters": 3, "hidden_dims": [16], "latent_dim": 2, "lr": 0.02, "pretrain_epochs": 3}
    return DCN(**{**settings, **changes})


def test_the_same_module_trains_centrally_and_finds_the_blobs(blobs: Any, trainer: Any) -> None:
    data, module = blobs((60, 60), batch_size=16), central()
    runner = trainer(12)
    runner.fit(module, datamodule=data)
    logged = {name: float(value) for name, value in runner.callback_metrics.items()}
    assert {"train/loss", "train/recon", "train/clust", "val/dbi", "val/acc", "val/recon"} <= logged.keys()
    assert logged["train/loss"] == pytest.approx(logged["train/recon"] + 0.01 * logged["train/clust"], rel=1e-5)
    found = runner.test(module, datamodule=data, verbose=False)[0]
    assert found["test/acc"] == 1.0
    assert found["test/recon"] < 0.05
    table = data.test
    assert found["test/dbi"] == pytest.approx(
        davies_bouldin_score(module.latents(table.x).double(), module(table.x)), abs=1e-5
    )
    outputs = runner.predict(module, datamodule=data)
    assert torch.equal(torch.cat([part["cluster"] for part in outputs]), module.assignments(table.x)[0])


def test_central_phases(blobs: Any, trainer: Any, monkeypatch: Any) -> None:
    seen: list[LossWeights] = []
    original = DCN.terms
    monkeypatch.setattr(
        DCN, "terms", lambda self, batch, weights: seen.append(weights) or original(self, batch, weights)
    )
    data = blobs((40, 40), batch_size=64)
    trainer(5).fit(central(cluster_weight=0.5, recon_weight=2.0), datamodule=data)
    assert seen == [LossWeights(2.0, 0.0, 0.0)] * 3 + [LossWeights(2.0, 0.5, 0.0)] * 2


def test_central_without_pretraining_starts_from_real_centres(blobs: Any, trainer: Any, monkeypatch: Any) -> None:
    centers: list[torch.Tensor] = []
    original = DCN.terms
    monkeypatch.setattr(
        DCN,
        "terms",
        lambda self, batch, weights: centers.append(self.centers.clone()) or original(self, batch, weights),
    )
    trainer(1).fit(central(pretrain_epochs=0), datamodule=blobs((40, 40)))
    assert float(centers[0].abs().sum()) > 0


def test_central_runs_are_functions_of_the_seed(blobs: Any, trainer: Any) -> None:
    def trained(seed: int, folder: str) -> torch.Tensor:
        torch.manual_seed(len(folder))
        module = central()
        trainer(4, folder=folder).fit(module, datamodule=blobs((40, 40), seed=seed, batch_size=16))
        return torch.cat([value.flatten().double() for value in module.state_dict().values()])

    assert torch.equal(trained(0, "a"), trained(0, "bb"))
    assert not torch.equal(trained(0, "a"), trained(1, "a"))


def test_a_resumed_central_run_goes_on_from_its_weights(blobs: Any, trainer: Any, tmp_path: Any) -> None:
    data = blobs((40, 40), batch_size=128)  # one batch a pass, so that only rounding depends on the order
    losses = {}
    for folder, epochs, resumed in (("whole", 6, None), ("half", 3, None), ("rest", 6, "half")):
        runner = trainer(epochs, folder=folder)
        path = None if resumed is None else str(tmp_path / resumed / "last.ckpt")
        runner.fit(central(), datamodule=data, ckpt_path=path, weights_only=True)
        losses[folder] = float(runner.callback_metrics["train/loss"])
    assert losses["rest"] == pytest.approx(losses["whole"], rel=1e-3)
    assert losses["half"] > 1.2 * losses["whole"]


def test_a_central_checkpoint_loads_without_pickled_objects(blobs: Any, trainer: Any, tmp_path: Any) -> None:
    module = central(hidden_dims=(16, 8))
    trainer(2).fit(module, datamodule=blobs((40, 40)))
    again = DCN.load_from_checkpoint(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert torch.equal(again.centers, module.centers)
    x = torch.rand(5, 6)
    assert torch.equal(again.eval()(x), module.eval()(x))


def test_central_without_labels_and_with_a_last_row(blobs: Any, trainer: Any) -> None:
    data = blobs((40, 40), labels=False, batch_size=1)
    for size in range(8, 64):
        if len(data.train) % size == 1:
            break
    data = blobs((40, 40), labels=False, batch_size=size)
    assert len(data.train) % size == 1
    runner = trainer(2)
    runner.fit(central(), datamodule=data)
    assert not {"val/acc", "val/nmi", "val/ari"} & runner.callback_metrics.keys()
    assert math.isfinite(float(runner.callback_metrics["train/loss"]))


def test_another_data_module_is_refused(trainer: Any) -> None:
    class Other(pl.LightningDataModule):
        def train_dataloader(self) -> list[dict[str, torch.Tensor]]:
            return [{"x": torch.rand(8, 6)}]

    with pytest.raises(TypeError, match=r"fedclust.FederatedDataModule"):
        trainer().fit(central(input_dim=6), datamodule=Other())


@pytest.mark.slow
def test_central_geometry_uses_the_embedding_of_its_own_rows(blobs: Any, trainer: Any, monkeypatch: Any) -> None:
    seen: list[bool] = []
    original = DCN.terms

    def terms(self: DCN, batch: Any, weights: LossWeights) -> Any:
        seen.append(torch.equal(batch["target"], self._target[batch["index"]]))
        return original(self, batch, weights)

    monkeypatch.setattr(DCN, "terms", terms)
    data, module = blobs((40, 40), batch_size=16), central(geometry_weight=0.1)
    runner = trainer(2)
    runner.fit(module, datamodule=data)
    assert all(seen)
    assert seen
    assert module._target.shape == (len(data.train), 2)
    assert "train/geom" in runner.callback_metrics
