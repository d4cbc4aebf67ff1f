"""Figures, table and picture of the leakage benchmark."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import common
import matplotlib
import torch
from leakage_views import VIEWS
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INTRO = """# Gradient inversion against PA-CFL (Figure 10)

What the attack with the smallest loss rebuilt; of several images the mean, and the best one beside it. Lower MSE,
higher PSNR and SSIM: more has leaked. `guess` uses no gradient at all: a view that does not beat it has shown no leak
to this attack, which does not prove that a better attack finds none. `as_sorted` is a heuristic: it fits the values at
the common coordinates π^g with the dummy's own largest. Written by `python benchmarks/leakage_pa_cfl.py`, whose
docstring says what each attacker sees and optimises.
"""


def compare(image: Tensor, truth: Tensor) -> dict[str, float]:
    """MSE, PSNR and SSIM of two images (c, h, w), the first cut to [0, 1]."""
    cut, truth = image.clamp(0, 1)[None], truth[None]
    return {
        "mse": float(torch.mean((cut - truth).square())),
        "psnr": float(peak_signal_noise_ratio(cut, truth, data_range=1.0)),
        "ssim": float(structural_similarity_index_measure(cut, truth, data_range=1.0)),
    }


def markdown(report: dict[str, Any], name: str) -> str:
    """The report as Markdown."""
    settings = ", ".join(f"{key} {value}" for key, value in report["settings"].items())
    lines = [INTRO, f"Settings: {settings}. Commit {report['versions']['commit']}.", ""]
    rows, several = report["rows"], len({row["image"] for row in report["rows"]}) > 1
    figures = (("mse", min, 4), ("psnr", max, 1), ("ssim", max, 3))
    heads = ["view", "k / d"]
    for figure, _, _ in figures:
        heads += [figure.upper(), f"best {figure.upper()}"] if several else [figure.upper()]
    heads += ["labels found", "CPU s"]
    lines += common.heading(heads)
    for view, top_k in dict.fromkeys((row["view"], row.get("top_k")) for row in rows):
        same = [row for row in rows if (row["view"], row.get("top_k")) == (view, top_k)]
        columns = [view, "" if top_k is None else f"{top_k:.1%}"]
        for figure, best, digits in figures:
            values = [row[figure] for row in same]
            columns += [f"{value:.{digits}f}" for value in ((mean(values), best(values)) if several else values)]
        labels = [row["label_found"] for row in same if "label_found" in row]
        columns.append(f"{sum(labels)} of {len(labels)}" if labels else "")
        columns.append(f"{mean(row['cpu_seconds'] for row in same):.1f}" if labels else "")
        lines.append(common.row(columns))
    return "\n".join([*lines, "", f"![Originals and reconstructions]({name}.png)"]) + "\n"


def draw(pictures: list[dict[str, Tensor]], shares: list[float], path: Path) -> None:
    """A grid: a row per image and view, a column per k; the original and what the whole gradient gives beside them."""
    shown, views, width = pictures[:2], len(VIEWS), len(shares) + 2
    figure, axes = plt.subplots(
        len(shown) * views, width, figsize=(width * 0.9, len(shown) * views * 0.95), squeeze=False
    )
    for axis in axes.flat:
        axis.axis("off")
    for block, found in enumerate(shown):
        first = block * views
        for row, name in enumerate(("original", "whole", "guess")):
            _tile(axes[first + row, 0], found[name], name)
        for row, view in enumerate(VIEWS):
            axes[first + row, 1].text(1, 0.5, view, ha="right", va="center", fontsize=8)
            for column, share in enumerate(shares):
                _tile(axes[first + row, 2 + column], found[f"{view}/{share}"], f"k = {share:.1%}" if row == 0 else "")
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _tile(axis: Any, image: Tensor, title: str) -> None:
    axis.imshow(image.permute(1, 2, 0), cmap="gray", vmin=0, vmax=1)
    axis.set_title(title, fontsize=8, pad=2)
