"""A wrong name in a configuration is answered with what was probably meant."""

from __future__ import annotations

import pytest


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
