"""Which direction of a metric is better."""

from __future__ import annotations

from typing import Literal

Direction = Literal["min", "max"]

_BETTER: dict[str, Direction] = {
    "dbi": "min", "recon": "min", "loss": "min", "clust": "min", "geom": "min", "silhouette": "max",
    "silhouette_input": "max", "acc": "max", "nmi": "max", "ari": "max", "acc_mean": "max", "acc_worst": "max",
    "acc_pooled": "max", "f1_macro": "max", "f1_worst": "max", "auc": "max", "auc_worst": "max", "populated": "max",
    "dbi_final": "min", "delta": "max", "epsilon_round": "min", "epsilon_total": "min",
}  # fmt: skip


def better(metric: str) -> Direction | None:
    """Gives "min" or "max", whichever is better for a metric such as `val/dbi`; None where that is not known.

    Names count without what stands before their last slash, except for `privacy/delta`, which has no better side.
    """
    return None if metric == "privacy/delta" else _BETTER.get(metric.rpartition("/")[2])
