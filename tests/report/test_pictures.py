"""Pictures of a method's own tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedclust.report.pictures import draw_curve

ROWS = [{"clusters": 2, "silhouette": 0.1}, {"clusters": 3, "silhouette": 0.6}, {"clusters": 4, "silhouette": 0.2}]


def test_a_curve_becomes_a_png_and_leaves_the_backend_alone(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = dict.__getitem__(matplotlib.rcParams, "backend")
    assert draw_curve(ROWS, "FMCL: curve", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert dict.__getitem__(matplotlib.rcParams, "backend") == before


def test_without_matplotlib_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_curve(ROWS, "FMCL: curve", tmp_path / "curve.png")
    assert not list(tmp_path.iterdir())
