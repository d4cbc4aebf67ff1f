"""Pictures of a method's own tables, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_curve(rows: Sequence[Mapping[str, float]], title: str, path: Path) -> bool:
    """Draws the second column of a table over the first and rings its largest value.

    Args:
        rows: At least one row; its first two columns are used.
        title: Stands above the picture.
        path: A PNG file.

    Returns:
        False, and no file, where matplotlib is not installed (`pip install 'fedclust[figures]'`).

    Raises:
        OSError: If the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    across, up = list(rows[0])[:2]
    best = max(rows, key=lambda row: row[up])
    # Neither pyplot nor a display: a run must not change a notebook's backend.
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([row[across] for row in rows], [row[up] for row in rows], marker=".")
    axes.plot(best[across], best[up], "o", markersize=12, fillstyle="none", color="black")
    axes.set(xlabel=across, ylabel=up, title=title)
    figure.savefig(path, dpi=120)
    return True
