"""Every benchmark script starts, its small documented command runs, and the tables are those of the JSONs."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "benchmarks").glob("*.py"))}
SCRIPTS = [name for name, text in SOURCES.items() if "ArgumentParser(" in text]
SMALL = re.compile(r"^    python benchmarks/(\w+)\.py (.* --out /tmp/try)$", re.M)
REAL_DATA = ("leakage_pa_cfl", "similarity_pa_cfl")
# Where no documented command is small, or writes to /tmp/try.
OTHERS = {
    "local_step": "--point CNN --rows 64 --epochs 1",
    "privacy_phase_pa_cfl": "--users 2 --timed-users 1 --noise simulated --out /tmp/try",
    "scaling": "--point InProcess 3 20 1",
    "tiny_clients": "--clients 4 --epochs 1 --rounds 1",
}
# They need minutes, an encoder's weights or a checkpoint.
LONG = {"digits_baselines", "feddcn_encoded", "feddcn_optima", "reproduce_feddcn", "tuning_objectives"}
TABLES = {
    "distances": "distances.md",
    "leakage_pa_cfl": "leakage_pa_cfl.md",
    "reproduce_feddcn": "feddcn.md",
    "reproduce_pa_cfl": "pa_cfl.md",
    "rounds": "rounds.md",
    "similarity_pa_cfl": "similarity_pa_cfl.md",
    "tuning_objectives": "tuning_objectives.md",
}


def test_no_helper_of_the_tests_is_named_like_a_script() -> None:
    """Both folders are on the path here, and a module of either may be loaded already."""
    helpers = {path.stem for path in (ROOT / "tests").glob("*.py")}
    assert not helpers & set(SOURCES)


def small_commands() -> dict[str, str]:
    """Script → arguments of the last command of its docstring that writes to /tmp/try."""
    docstrings = [ast.get_docstring(ast.parse(SOURCES[name]), clean=False) or "" for name in SCRIPTS]
    return dict(match for text in docstrings for match in SMALL.findall(text))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a script in this process and returns what it printed; it must end well."""

    def run(name: str, *arguments: str) -> str:
        path = ROOT / "benchmarks" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        code = None
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
        assert not code, code
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_the_script_does(name: str, script: Callable[..., str]) -> None:
    first, *_ = (ast.get_docstring(ast.parse(SOURCES[name])) or "").splitlines()
    printed = script(name, "--help")
    assert printed.startswith("usage: ")
    assert first in printed


def test_every_script_is_tried() -> None:
    assert {*small_commands(), *OTHERS, *LONG} == set(SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), sorted({**small_commands(), **OTHERS}.items()))
def test_small_commands_run(
    name: str,
    arguments: str,
    script: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if name in REAL_DATA:
        root = request.getfixturevalue("real_data_root")
        if not (root / "FashionMNIST" / "raw").is_dir():
            pytest.skip("no FashionMNIST files on this machine")
        monkeypatch.setenv("FEDCLUST_DATA", str(root))
    monkeypatch.setitem(sys.modules, "tslearn", None)  # compiles for ten seconds; a peer may be missing
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for processes that a script starts
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    more = ["--work", str(tmp_path / "work")] if '"--work"' in SOURCES[name] else []
    printed = script(name, *arguments.replace("/tmp/try", str(out)).split(), *more)
    if "/tmp/try" not in arguments:
        assert json.loads(printed.splitlines()[-1])
        return
    reports = [json.loads(path.read_text()) for path in out.glob("*.json")]
    assert reports
    assert all(reports)
    if name != "profile_feddcn":
        (table,) = out.glob("*.md")
        assert re.search(r"^\|( ?-+ ?\|)+\n\| ?\w", table.read_text(), re.M)


@pytest.mark.parametrize(("name", "table"), TABLES.items())
def test_tables_say_what_the_jsons_say(name: str, table: str, script: Callable[..., str], tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results"
    if not results.is_dir():
        pytest.skip("no results beside the sources")
    for path in results.glob("*.json"):
        shutil.copy(path, tmp_path)
    script(name, "--table", "--out", str(tmp_path))
    assert (tmp_path / table).read_text() == (results / table).read_text()
