"""What a reviewer and a new user ran into: malformed replies in protected sums, clients without a group, NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import fedclust
from fedclust.clustering.statistics import silhouette_sum
from fedclust.federation.client import action
from fedclust.federation.errors import ClientError, FederationError
from lightning_modules import DCN, Classifier, FLAMECHEClient


class Cheat(Classifier):
    """Client 1 sends something else in one step of the sum."""

    step = ""
    part = ""

    @action
    def contribute_weights(self, message: Any, ctx: Any) -> Any:
        """What Classifier answers, spoiled."""
        reply = super().contribute_weights(message, ctx)
        if ctx.id == 1 and message["step"] == self.step:
            size = 3 if self.part == "chunk/0" else len(reply[self.part]) - (self.part == "letters")
            reply[self.part] = bytes(size)
        return reply


CASES = [
    ("secure_sum", "share_keys", "letters", "client 1 failed in 'contribute_weights'"),
    ("secure_sum", "reveal", "shares", "a share of client 0's secret is wrong; no sum is given. One of clients"),
    ("ckks", "input", "chunk/0", "client 1 failed in 'contribute_weights'"),
]


def train(cheat: type[Cheat], mode: str, on_failure: Any) -> fedclust.Result:
    data = fedclust.FederatedDataModule("digits", fedclust.Iid(5), seed=0)
    backend = fedclust.InProcess(on_failure=on_failure)
    method = fedclust.FedAvg(aggregation=mode)  # type: ignore[arg-type]
    return fedclust.federate(method, cheat("linear"), data, rounds=1, backend=backend, progress=False)


@pytest.mark.parametrize(("mode", "step", "part", "note"), CASES)
def test_a_bad_reply_in_a_protected_sum_costs_its_client_or_the_round(
    mode: str, step: str, part: str, note: str
) -> None:
    if mode == "ckks":
        pytest.importorskip("tenseal")
    cheat = type("Cheat", (Cheat,), {"step": step, "part": part})
    result = train(cheat, mode, "skip")
    assert any(note in text for text in result.notes), result.notes
    stays = any("the model stays as it was" in text for text in result.notes)
    assert stays == (part == "shares")
    with pytest.raises(FederationError, match=r"client 1|One of clients") as caught:
        train(cheat, mode, "raise")
    assert isinstance(caught.value, ClientError) == (part != "shares")


def test_a_refused_ciphertext_leaves_nothing_in_the_sum() -> None:
    ts = pytest.importorskip("tenseal")
    from fedclust.privacy.ckks import CKKSSum

    mode, vectors = CKKSSum(), {client: np.full(6000, (client + 1) / 8) for client in range(4)}
    for spoiled in ("chunk/0", "chunk/1"):
        server = mode.server(vectors, 6000, 1.0)
        states: dict[int, Any] = {client: {} for client in vectors}
        for step in mode.steps:
            for client, request in server.requests(step).items():
                side = mode.client(client, states[client])
                reply, states[client] = side.reply(request, vectors[client]), side.state
                if client == 0 and step == "input":
                    own = ts.context_from(request["context"])
                    bad = {**reply, spoiled: ts.ckks_vector(own, [0.1] * 4096, scale=2.0**40).serialize()}
                    if spoiled == "chunk/1":
                        bad[spoiled] = ts.ckks_vector(own, [0.1] * (6000 - 4096), scale=2.0**40).serialize()
                    with pytest.raises(ValueError, match=r"client 0: needs ciphertexts of \(scale, polynomials"):
                        server.receive(client, bad)
                server.receive(client, reply)
        assert np.abs(server.result().total - sum(vectors.values())).max() <= server.max_error


def test_no_context_of_the_encryption_is_named() -> None:
    pytest.importorskip("tenseal")
    from fedclust.privacy.ckks import CKKSSum

    server = CKKSSum().server((3, 4), 2, 1.0)
    server.requests("advertise")
    for context in (b"", b"abc"):
        with pytest.raises(ValueError, match="client 3: what was sent is no context of the encryption"):
            server.receive(3, {"step": "advertise", "round": 0, "context": context})


@pytest.mark.parametrize("where", ["row", "mean"])
def test_a_silhouette_of_nan_is_nan(where: str) -> None:
    z, means = torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64) / 2
    (z if where == "row" else means)[1, 1] = math.nan
    labels, counts = torch.arange(3), torch.tensor([2, 2, 2])
    assert math.isnan(float(silhouette_sum(z, labels, means, counts)))


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


def test_one_start_of_protected_sums_is_noted() -> None:
    data = fedclust.FederatedDataModule("digits", fedclust.Iid(4), transform=fedclust.Rotations(), seed=0)
    method = fedclust.FLAMECHE(2, round_epochs=0, aggregation="secure_sum")
    result = fedclust.federate(method, FLAMECHEClient("linear"), data, rounds=1, progress=False)
    assert any("n_init is 1, as sums are protected" in note for note in result.notes)


def test_widths_without_quotes_are_no_date_and_merge_keys_are_read(tmp_path: Any) -> None:
    from tuning.space import load_space

    file = tmp_path / "mine.yaml"
    file.write_text(
        "parameters:\n"
        "  a.hidden_dims: {kind: layers, choices: [1024-12-16, [64, 32]]}\n"
        "  a.lr: &range {kind: log_float, low: 1e-4, high: 1}\n"
        "  b.lr: {<<: *range, high: 10, when: {hidden_dims: [[64, 32]]}}\n"
    )
    widths, first, second = load_space(file).parameters
    assert vars(widths.distribution)["choices"] == ("1024-12-16", "64-32")
    assert (vars(first.distribution)["high"], vars(second.distribution)["high"]) == (1.0, 10.0)
    assert second.when == {"hidden_dims": ["64-32"]}


@pytest.mark.parametrize("path", ["name", "runs_root", "ckpt_path", "trainer.enable_progress_bar"])
def test_what_a_study_sets_itself_is_not_searched(path: str) -> None:
    from tuning.space import parse_space

    entry = {"kind": "categorical", "choices": ["a", "b"]}
    with pytest.raises(ValueError, match=f"space: {path} cannot be searched"):
        parse_space({"parameters": {path: entry}}, "space")


@pytest.mark.parametrize("entry", [{"high": 10**400}, {"low": 1e-320, "high": 1e308, "step": 1e-300}])
def test_numbers_beyond_reason_name_their_parameter(entry: dict[str, Any]) -> None:
    from tuning.space import parse_space

    with pytest.raises(ValueError, match=r"space: model\.lr"):
        parse_space({"parameters": {"model.lr": {"kind": "float", "low": 0, **entry}}}, "space")


def test_a_term_that_is_never_computed_is_no_metric() -> None:
    method = fedclust.FedDCN(geometry_pretrain=0.0, geometry_federated=0.0)
    assert {"train/geom", "train/recon"} & method.metric_names(labels=False) == {"train/recon"}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("model: lightning_modules.FMCLClient: Option 'learning_rate' is not accepted", "; FMCLClient takes encoder, "),
        ("model: fedclust.FMCL: Option 'nclusters' is not accepted", "; did you mean n_clusters?"),
        ("unrecognized arguments: --trainer.max_epoch 3", "; did you mean --trainer.max_epochs?"),
        ("there is no class Processes, give its import path", "; did you mean fedclust.Processes?"),
        ("there is no class Nowhere, give its import path", None),
        ("model: nowhere.Kind: Option 'x' is not accepted", None),
    ],
)
def test_wrong_names_get_a_hint(text: str, hint: str | None) -> None:
    from fedclust.launch.hints import with_hint

    found = with_hint(text)
    assert found == text if hint is None else found.startswith(text + hint)


def test_hidden_dims_must_be_a_list() -> None:
    with pytest.raises(ValueError, match=r"hidden_dims must be a list of widths such as \[128, 64\], got 128"):
        fedclust.cluster([np.eye(12, dtype=np.float32)] * 2, n_clusters=2, hidden_dims=128)  # type: ignore[arg-type]


def test_central_training_refuses_other_precisions(tmp_path: Any) -> None:
    import pytorch_lightning as pl

    data = fedclust.FederatedDataModule("digits", fedclust.Iid(2), seed=0)
    trainer = pl.Trainer(
        precision="bf16-true", max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    with pytest.raises(ValueError, match="precision 'bf16-true' cannot be used"):
        trainer.fit(DCN(10, hidden_dims=[16], latent_dim=2), data)


def test_a_file_that_is_no_journal_is_named(tmp_path: Any) -> None:
    from tuning.storage import StorageError, StorageName

    for content in ('{"a": 1}\n', "5\n"):
        file = tmp_path / "file.log"
        file.write_text(content)
        with pytest.raises(StorageError, match=r"--storage journal:.*is no journal of Optuna"):
            StorageName.of(f"journal:{file}", tmp_path).open()


def test_starting_workers_is_no_part_of_a_stage() -> None:
    data = fedclust.FederatedDataModule("digits", fedclust.Iid(2), seed=0)
    result = fedclust.federate(
        fedclust.FedAvg(), Classifier("linear"), data, rounds=1, backend=fedclust.Processes(1), progress=False
    )
    seconds = result.summary["seconds"]
    assert seconds["workers"] > seconds["train"]


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import fedclust.cli.commands
    from fedclust.cli import main

    def interrupted(*arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(fedclust.cli.commands, "run_command", interrupted)
    assert main(["fit", "--config", "feddcn_digits"]) == 130
