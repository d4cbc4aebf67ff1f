"""How good classifiers are: accuracy, macro-F1 and area under the ROC, per client and over all clients."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor


def class_confusion(true: Tensor, pred: Tensor, n_classes: int) -> Tensor:
    """Rows of each true class (first axis) predicted as each class; (C, C) int64."""
    flat = torch.bincount(true * n_classes + pred, minlength=n_classes * n_classes)
    return flat.reshape(n_classes, n_classes)


def roc_auc(true: Tensor, probabilities: Tensor) -> float | None:
    """Area under the ROC, one class against the rest, averaged over the classes that occur.

    Args:
        true: (n,) classes.
        probabilities: (n, C), rows sum to 1.

    Returns:
        The area, or None where it is undefined: fewer than two classes occur.
    """
    classes = torch.unique(true).tolist()
    if len(classes) < 2:
        return None
    areas = [roc_auc_score((true == c).numpy(), probabilities[:, c].numpy()) for c in classes]
    return float(np.mean(areas))


def accuracy(confusion: Tensor) -> float:
    """Share of rows on the diagonal.

    Raises:
        ValueError: If there is no row.
    """
    total = int(confusion.sum())
    if total == 0:
        raise ValueError("accuracy needs at least one row")
    return float(confusion.diagonal().sum()) / total


def macro_f1(confusion: Tensor) -> float:
    """Mean F1 of the classes that occur as true or predicted class."""
    hits = confusion.diagonal().double()
    sizes = (confusion.sum(0) + confusion.sum(1)).double()
    held = sizes > 0
    return float((2 * hits[held] / sizes[held]).mean())


def user_metrics(confusions: Sequence[Tensor], areas: Sequence[float | None]) -> dict[str, float]:
    """Metrics over users from their confusion counts; users without rows are left out.

    Args:
        confusions: One (C, C) table per user.
        areas: One area under the ROC per user, None where it is undefined.

    Returns:
        "acc_mean" (mean over users), "acc_worst", "acc_pooled" (all rows), "f1_macro" (mean over users), "f1_worst",
        and where it is defined for any user "auc" (mean over those users), "auc_worst" and "auc_users", their number.

    Raises:
        ValueError: If no user has a row.
    """
    held = [confusion for confusion in confusions if int(confusion.sum())]
    if not held:
        raise ValueError("no client has a row in this split, so nothing can be evaluated on it")
    accuracies = [accuracy(confusion) for confusion in held]
    scores = [macro_f1(confusion) for confusion in held]
    metrics = {
        "acc_mean": fmean(accuracies),
        "acc_worst": min(accuracies),
        "acc_pooled": accuracy(torch.stack(held).sum(0)),
        "f1_macro": fmean(scores),
        "f1_worst": min(scores),
    }
    defined = [area for area in areas if area is not None]
    if defined:
        metrics |= {"auc": fmean(defined), "auc_worst": min(defined), "auc_users": float(len(defined))}
    return metrics
