"""FLAMECHE: the EM round by round against its formulas, and planted groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from rotated import by_class_shares, fit, planted
from sklearn.metrics import adjusted_rand_score
from torch import nn

import fedclust
from fedclust.algorithms.flameche import FLAMECHE
from fedclust.algorithms.flameche_state import inherited, matching
from fedclust.clustering.mixtures import Metadata, Spherical
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import Iid
from fedclust.data.transforms import LabelSwaps, Rotations
from fedclust.federation.loop import FederatedLoop
from lightning_modules.flameche import FLAMECHEClient


@pytest.fixture
def run(trainer: Any) -> Callable[..., FederatedLoop]:
    return partial(fit, trainer)


def metadata(loop: FederatedLoop, client: int) -> Metadata:
    own = loop.backend.states.get(client)
    return Metadata(torch.as_tensor(own["metadata/blocks"]), torch.as_tensor(own["metadata/counts"]))


def test_metadata_are_class_means_of_random_features_the_same_for_all(run: Any) -> None:
    loop = run(FLAMECHE(2))
    table = loop.backend.data.client(3).train
    features = loop.client.random_features(table.x, 0)
    assert features.shape == (len(table), 84)
    assert (features >= 0).all()
    found = metadata(loop, 3)
    for label in (0, 1):
        assert torch.allclose(found.blocks[label], features[table.y == label].mean(0), atol=1e-6)
        assert int(found.counts[label]) == int((table.y == label).sum())
    assert torch.equal(features, loop.client.random_features(table.x, 0))
    assert not torch.equal(features, loop.client.random_features(table.x, 1))


def test_e_step_and_m_step_equal_the_formulas(run: Any) -> None:
    """Round 2 of one start: nearest centroid of round 1, then means over the latest members."""
    one = run(FLAMECHE(2, n_init=1, recluster_every=None))
    two = run(FLAMECHE(2, n_init=1, recluster_every=None), rounds=2, folder="two")
    described = [metadata(two, client) for client in range(8)]
    centers = one.state.parameters.float().double()
    slots = [int(Spherical().costs(own, centers)[0].argmin()) for own in described]
    assert two.state.slots[0].tolist() == slots
    for cluster in set(slots):
        members = [own.blocks for own, slot in zip(described, slots, strict=True) if slot == cluster]
        assert torch.allclose(two.state.parameters[0, cluster].float(), torch.stack(members).mean(0), atol=1e-6)


@pytest.mark.parametrize("transform", [Rotations([0, 180]), LabelSwaps([[], [[0, 1]]])])
def test_planted_groups_are_found(run: Any, transform: Any) -> None:
    loop = run(FLAMECHE(2), rounds=4, data=planted(transform=transform))
    assert loop.latest["clients/ari"] == 1.0
    assert loop.latest["clusters/final"] == 2.0


@pytest.mark.parametrize("mixture", ["gaussian", "multinomial"])
def test_other_mixtures_run_and_multinomial_groups_by_class_shares(run: Any, mixture: str) -> None:
    loop = run(FLAMECHE(2, mixture=mixture), rounds=5, data=by_class_shares())
    assert torch.isfinite(loop.state.parameters).all()
    if mixture == "multinomial":
        assert adjusted_rand_score([0, 1] * 3, loop.state.clusters) == 1.0


def test_partial_participation_keeps_assignments_and_never_invents_any(run: Any) -> None:
    """Six clients in two groups, K = 4, a third of them a round, τ = 2, 10 rounds (G7)."""
    algorithm = FLAMECHE(4, recluster_every=2)
    seen: set[int] = set()
    original = algorithm.round

    def round(state: Any, cohort: list[int], server: Any) -> Any:
        seen.update(cohort)
        new, metrics = original(state, cohort, server)
        for slots in new.slots:
            assert {client for client, slot in enumerate(slots.tolist()) if slot >= 0} == seen
            assert all(slot < 4 for slot in slots.tolist())
        assert torch.isfinite(new.parameters).all()
        assert FLAMECHE.assignments(new).keys() == seen
        return new, metrics

    algorithm.round = round
    loop = run(algorithm, rounds=10, data=planted(6), cohort_size=2)
    assert torch.isfinite(loop.state.parameters).all()


def test_metadata_are_uploaded_once(run: Any) -> None:
    """Per client: (2 classes) × (84 features and an indicator) as float64; later rounds tell slots and errors only."""
    loop = run(FLAMECHE(2, n_init=3), rounds=4)
    counts = loop.byte_counts()
    assert counts["describe_metadata"]["up"] == 8 * 2 * 85 * 8
    assert counts["locate"]["up"] == 4 * 8 * 3 * (8 + 8)


def test_zero_epochs_group_without_training(run: Any) -> None:
    loop = run(FLAMECHE(2, round_epochs=0), rounds=4)
    assert loop.latest["clients/ari"] == 1.0
    assert "update" not in loop.byte_counts()
    assert all(torch.equal(values[0], loop.state.initial[name]) for name, values in loop.state.models.items())


def test_more_clusters_than_clients_and_bad_arguments_are_refused(run: Any) -> None:
    with pytest.raises(ValueError, match="n_clusters is 9, but only 8 clients hold rows"):
        run(FLAMECHE(9))
    for changes in ({"n_clusters": 0}, {"n_init": 0}, {"mixture": "cauchy"}, {"recluster_every": 0}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            FLAMECHE(**{"n_clusters": 2, **changes})


def test_models_follow_their_clients_when_another_start_wins() -> None:
    before, after = torch.tensor([0, 0, 1, 1, -1]), torch.tensor([1, 1, 2, 2, 0])
    order = matching(before, after, 3)
    assert order[1] == 0
    assert order[2] == 1
    assert sorted(order.tolist()) == [0, 1, 2]


def test_reclustered_clients_keep_the_model_that_they_had(run: Any) -> None:
    loop = run(FLAMECHE(3, n_init=1), rounds=1)
    state = loop.state
    moved = state.clusters.clone()
    victim = int(moved[0])
    empty = next(cluster for cluster in range(3) if cluster != victim)
    moved[0] = empty
    models = inherited(state, moved)
    for name, values in models.items():
        assert torch.equal(values[empty], state.models[name][victim])


def test_a_new_client_finds_its_cluster_by_itself_and_signatures_are_metadata() -> None:
    data = planted(val_fraction=0.0)  # without a validation part the last round counts
    result = fedclust.federate(
        FLAMECHE(2), FLAMECHEClient("small_cnn", lr=0.1, batch_size=16), data, rounds=4, progress=False
    )
    other = planted(8, seed=1)
    found = [result.assign(other.client(client)) for client in range(8)]
    assert adjusted_rand_score([client % 2 for client in range(8)], found) == 1.0
    assert found[0] == result.assignments[0]
    assert result.signature(2)["blocks"].shape == (2, 84)


def test_one_client_and_a_client_with_one_class(run: Any) -> None:
    loop = run(FLAMECHE(1), data=planted(1))
    assert loop.state.clusters.tolist() == [0]
    x, y = np.random.default_rng(0).uniform(0, 1, (20, 1, 8, 8)).astype(np.float32), np.arange(20) % 2
    clients = [(x, y), (x[y == 0], y[y == 0]), (x[y == 1], y[y == 1])]
    loop = run(FLAMECHE(2), rounds=3, folder="three", data=FederatedDataModule(clients, seed=0, val_fraction=0.0))
    assert (loop.state.clusters >= 0).all()
    assert torch.isfinite(loop.state.parameters).all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_clusters": 3}, "n_clusters: the run that is resumed has 2, this one 3"),
        ({"n_init": 1}, "n_init: the run that is resumed has 2, this one 1"),
        ({"mixture": "gaussian"}, "mixture: the run that is resumed has spherical, this one gaussian"),
        ({"aggregation": "secure_sum"}, "aggregation: the run that is resumed has plain, this one a protected mode"),
    ],
)
def test_a_run_goes_on_with_the_arguments_that_it_began_with(
    run: Any, trainer: Any, tmp_path: Any, changes: dict[str, Any], text: str
) -> None:
    settings = {"n_clusters": 2, "n_init": 2}
    loop = run(FLAMECHE(**settings))
    loop.trainer.save_checkpoint(tmp_path / "one.ckpt")
    other = FederatedLoop(FLAMECHE(**{**settings, **changes}), FLAMECHEClient("small_cnn", lr=0.1, batch_size=16))
    with pytest.raises(ValueError, match=text):
        trainer(2, folder="other").fit(other, datamodule=planted(), ckpt_path=tmp_path / "one.ckpt")


class Normalised(FLAMECHEClient):
    def make_network(self, input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        width = int(torch.Size(input_shape).numel())
        return nn.Sequential(
            nn.Flatten(), nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, n_classes)
        )


def test_random_features_do_not_depend_on_what_was_trained() -> None:
    module = Normalised(lr=0.1)
    module.build((1, 8, 8), 2)
    module.initialize(0)
    x = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = module.random_features(x, seed=3)
    module.train()
    for _ in range(5):
        module.training_step({"x": x, "y": torch.arange(20) % 2}, 0)["loss"].backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1.0
    assert torch.equal(module.random_features(x, seed=3), before)
    assert not torch.equal(module.random_features(x, seed=4), before)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_four_rotations_of_the_digits_are_found(seed: int) -> None:
    data = FederatedDataModule("digits", partition=Iid(20), transform=Rotations([0, 90, 180, 270]), seed=seed)
    result = fedclust.federate(
        FLAMECHE(4), FLAMECHEClient("small_cnn", lr=0.1, batch_size=64), data, rounds=6, progress=False
    )
    assert result.history[-1]["clients/ari"] >= 0.9


def test_who_was_never_drawn_is_named_and_predicts_with_a_warning() -> None:
    data = fedclust.FederatedDataModule("digits", fedclust.Iid(8), transform=fedclust.Rotations(), seed=0)
    method = fedclust.FLAMECHE(2, round_epochs=0)
    result = fedclust.federate(method, FLAMECHEClient("linear"), data, rounds=1, participation=0.5, progress=False)
    without = sorted(set(range(8)) - result.assignments.keys())
    assert len(without) == 4
    assert f"clients {without} have no group, so they are tested, and predict, with the initial weights" in result.notes
    with pytest.warns(UserWarning, match=f"client {without[0]} has no group, as no round had it"):
        result.predict(data.test, client=without[0])
    with pytest.raises(ValueError, match="client=0 … 7, or cluster=… as `assign` gives it to a new client"):
        result.predict(data.test)
