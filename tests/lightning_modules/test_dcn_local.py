"""Algorithm 1 and the client's actions: phases, steps, seeds, replies, tiny clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_modules.dcn import DCN
from lightning_modules.dcn_plan import LocalPlan, LossWeights


def rows(n: int, d: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def module(dcn: Any) -> DCN:
    made = dcn(input_dim=6)
    made.initialize(0)
    return made


@pytest.fixture
def spied(module: DCN, monkeypatch: Any) -> list[tuple[LossWeights, dict[str, tuple[int, ...]]]]:
    """The weights and the shapes of the batch of every call of `terms`."""
    calls: list[Any] = []
    original = module.terms

    def terms(batch: Any, weights: LossWeights) -> Any:
        calls.append((weights, {name: tuple(value.shape) for name, value in batch.items()}))
        return original(batch, weights)

    monkeypatch.setattr(module, "terms", terms)
    return calls


WEIGHTS = LossWeights(0.7, 0.3, 0.2)


def plan(pretrain: int = 2, alternate: int = 3, weights: LossWeights = WEIGHTS) -> LocalPlan:
    return LocalPlan(weights, pretrain, alternate)


def test_pretraining_has_lambda_zero_and_then_every_epoch_ends_with_kmeans(
    module: DCN, spied: Any, context: Any, monkeypatch: Any
) -> None:
    inits: list[Any] = []
    original = module.cluster_rows
    monkeypatch.setattr(
        module, "cluster_rows", lambda x, *, init=None, **more: inits.append(init) or original(x, init=init, **more)
    )
    result = module.local_dcn(context(), rows(20), plan(), target=rows(20, 2))
    assert [weights for weights, _ in spied] == [LossWeights(0.7, 0.0, 0.2)] * 6 + [WEIGHTS] * 9
    assert result.fit.n_steps == 9
    assert [init is None for init in inits] == [True, False, False, False]
    assert all(batch["target"] == (batch["x"][0], 2) for _, batch in spied)
    assert torch.equal(module.centers, result.clusters.centers)
    z = module.latents(rows(20))
    assert torch.equal(result.clusters.labels, torch.cdist(z, module.centers).argmin(1))


@pytest.mark.parametrize(("pretrain", "alternate", "steps"), [(2, 0, 6), (0, 2, 6), (0, 0, 0)])
def test_phases_may_be_left_out(module: DCN, context: Any, pretrain: int, alternate: int, steps: int) -> None:
    result = module.local_dcn(context(), rows(20), plan(pretrain, alternate, LossWeights(1.0, 0.1, 0.0)))
    assert result.fit.n_steps == steps
    assert result.clusters.n_populated == 3
    assert result.n_neighbors == 0


def test_rows_and_targets_stay_paired_through_shuffling(module: DCN, context: Any, monkeypatch: Any) -> None:
    x = rows(23)
    target = x[:, :2] * 10
    pairs: list[bool] = []
    original = module.terms
    monkeypatch.setattr(
        module, "terms", lambda batch, weights: pairs.append(torch.equal(batch["target"], batch["x"][:, :2] * 10))
        or original(batch, weights),
    )  # fmt: skip
    module.local_dcn(context(), x, plan(), target=target)
    assert len(pairs) == 15
    assert all(pairs)


def test_a_target_without_weight_is_not_used(module: DCN, spied: Any, context: Any) -> None:
    module.local_dcn(context(), rows(20), plan(weights=LossWeights(1.0, 0.1, 0.0)), target=rows(20, 2))
    assert all("target" not in batch for _, batch in spied)


def test_local_work_is_a_function_of_seed_round_and_client(dcn: Any, context: Any) -> None:
    def trained(**options: Any) -> torch.Tensor:
        module = dcn(input_dim=6)
        module.initialize(0)
        module.local_dcn(context(**options), rows(20), plan(1, 1, LossWeights(1.0, 0.1, 0.0)))
        return module.encoder[0].weight.detach().clone()

    assert torch.equal(trained(), trained())
    assert not torch.equal(trained(), trained(seed=1))
    assert not torch.equal(trained(), trained(round=2))


def local_message(module: DCN, **changes: Any) -> dict[str, Any]:
    weights = {f"weights/{name}": value for name, value in module.snapshot().items()}
    return {
        **weights, "recon_weight": 1.0, "cluster_weight": 0.1, "geometry_weight": 0.0, "pretrain_epochs": 2,
        "cluster_epochs": 1, "n_neighbors": 15, "min_dist": 0.1, "sampling": "isotropic", "counts": "within_sigma",
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize(("sampling", "shape"), [("isotropic", (3,)), ("diagonal", (3, 2))])
def test_stage_one_reveals_centres_spread_counts_decoder_and_sizes_only(
    module: DCN, context: Any, table: Any, sampling: str, shape: tuple[int, ...]
) -> None:
    ctx = context(table(rows(25)))
    reply = module.learn_locally(local_message(module, sampling=sampling), ctx)
    decoder = {f"decoder/{name}" for name in module.decoder_tensors()}
    numbers = {"n_rows", "n_steps", "counts_fell_back", "outside_output", "n_populated", "n_neighbors"}
    assert reply.keys() == decoder | numbers | {"centers", "spread", "counts"}
    assert reply["centers"].shape == (3, 2)
    assert reply["spread"].shape == shape
    assert reply["counts"].shape == (3,)
    assert int(reply["counts"].sum()) < 25
    assert reply["n_rows"] == 25
    assert all(not isinstance(reply[name], torch.Tensor) for name in numbers)
    assert ctx.state.keys() == {"assignments"}
    assert len(ctx.state["assignments"]) == 25


def test_two_distinct_rows_and_four_clusters(dcn: Any, context: Any, table: Any) -> None:
    module = dcn(input_dim=6, n_clusters=4)
    module.initialize(0)
    x = torch.cat([torch.zeros(6, 6), torch.ones(4, 6)])
    reply = module.learn_locally(local_message(module), context(table(x)))
    assert reply["n_populated"] == 2
    assert sorted(reply["counts"].tolist()) == [0, 0, 4, 6]
    assert torch.isfinite(reply["centers"]).all()
    assert reply["spread"].tolist() == pytest.approx([0.0] * 4, abs=1e-6)
    empty = reply["counts"] == 0
    assert reply["spread"][empty].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("n", "batch", "sizes"), [(5, 8, [5]), (33, 32, [33]), (9, 8, [9]), (17, 8, [8, 9])])
@pytest.mark.parametrize("augment", [True, False])
def test_update_batches(
    module: DCN, spied: Any, context: Any, table: Any, n: int, batch: int, sizes: list[int], augment: bool
) -> None:
    module.batch_size = batch
    reply = module.update(round_message(module, augment=augment), context(table(rows(n))))
    assert [shapes["x"][0] for _, shapes in spied] == [(1 + augment) * size for size in sizes] * 2
    assert [shapes["target"][0] for _, shapes in spied] == sizes * 2
    assert all(weights == WEIGHTS for weights, _ in spied)
    assert reply["n_steps"] == 2 * len(sizes)
    assert reply["n_rows"] == n
    assert {name for name in reply if name.startswith("term/")} == {
        "term/loss", "term/recon", "term/clust", "term/geom"
    }  # fmt: skip
    counter = reply["weights/encoder.1.num_batches_tracked"]
    assert (counter.dtype, counter.shape) == (torch.int64, ())


def round_message(module: DCN, **changes: Any) -> dict[str, Any]:
    weights = {f"weights/{name}": value for name, value in module.snapshot().items()}
    return {
        **weights, "recon_weight": 0.7, "cluster_weight": 0.3, "geometry_weight": 0.2, "epochs": 2, "augment": True,
        "centers": torch.zeros(3, 2), "synthetic": rows(11, seed=5), "geometry": rows(11, seed=5)[:, :2], **changes,
    }  # fmt: skip


def test_one_real_row_joined_by_a_synthetic_one_trains(module: DCN, context: Any, table: Any) -> None:
    message = round_message(module, geometry_weight=0.0)
    reply = module.update(message, context(table(rows(1))))
    assert reply["n_steps"] == 2
    assert all(torch.isfinite(value).all() for name, value in reply.items() if name.startswith("weights/"))


def test_synthetic_rows_keep_their_targets_in_every_batch(
    module: DCN, context: Any, table: Any, monkeypatch: Any
) -> None:
    drawn: list[torch.Tensor] = []
    original = module.terms

    def terms(batch: Any, weights: LossWeights) -> Any:
        assert torch.equal(batch["target"], batch["geometry_x"][:, :2])
        joined = batch["x"][len(batch["x"]) // 2 :]
        drawn.append(torch.stack([batch["geometry_x"][0], joined[0]]))
        return original(batch, weights)

    monkeypatch.setattr(module, "terms", terms)
    synthetic = rows(11, seed=5)
    module.update(round_message(module), context(table(rows(20))))
    known = {tuple(row.tolist()) for row in synthetic}
    assert all(tuple(row.tolist()) in known for pair in drawn for row in pair)
    assert any(not torch.equal(pair[0], pair[1]) for pair in drawn)  # geometry has a draw of its own


def test_zero_epochs_make_no_step_and_leave_the_weights(module: DCN, context: Any, table: Any) -> None:
    before = module.snapshot()
    reply = module.update(round_message(module, epochs=0), context(table(rows(20))))
    assert reply["n_steps"] == 0
    assert all(torch.equal(reply[f"weights/{name}"], value) for name, value in before.items())


def test_cluster_sees_real_and_synthetic_rows_and_starts_from_the_global_centres(
    module: DCN, context: Any, table: Any
) -> None:
    x = rows(20)
    module.cluster_rows(torch.cat([x, rows(11, seed=5)]), seed=1)
    start = module.centers.clone()
    for augment, count in ((True, 31), (False, 20)):
        ctx = context(table(x))
        reply = module.cluster(round_message(module, augment=augment, centers=start), ctx)
        seen = torch.cat([x, rows(11, seed=5)])[:count]
        z = module.latents(seen)
        labels = torch.cdist(z, reply["centers"]).argmin(1)
        for k in range(3):
            assert torch.allclose(reply["centers"][k], z[labels == k].mean(0), atol=1e-3)
        assert reply["populated"].tolist() == [True] * 3
        assert reply.keys() == {"centers", "populated"}
        assert len(ctx.state["assignments"]) == 20
    assert torch.allclose(
        module.cluster(round_message(module, centers=start), context(table(x)))["centers"], start, atol=1e-3
    )


def test_a_flipped_order_of_global_centres_flips_the_clusters(module: DCN, context: Any, table: Any) -> None:
    x = rows(30)
    module.cluster_rows(x, seed=1)
    start = module.centers.clone()
    one = module.cluster(round_message(module, augment=False, centers=start), context(table(x)))["centers"]
    two = module.cluster(round_message(module, augment=False, centers=start.flip(0)), context(table(x)))["centers"]
    assert torch.allclose(one, two.flip(0), atol=1e-5)
