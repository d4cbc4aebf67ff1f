"""The code that the documentation shows runs, and the names that it uses exist."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:<!-- example: (?P<file>\S+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def blocks(page: Path, language: str) -> list[str]:
    return [match["text"] for match in FENCE.finditer(page.read_text()) if match["language"] == language]


def write_examples(page: Path, folder: Path) -> list[str]:
    names = []
    for match in FENCE.finditer(page.read_text()):
        if match["file"]:
            (folder / match["file"]).write_text(match["text"])
            names.append(match["file"])
    return names


@pytest.fixture
def example_folder(tmp_path, monkeypatch):
    names = write_examples(ROOT / "docs" / "adding_a_method.md", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path, names
    for name in names:
        sys.modules.pop(Path(name).stem, None)


def test_the_methods_page_holds_a_whole_method(example_folder):
    _, names = example_folder
    assert names == ["kmeans_client.py", "federated_kmeans.py", "fed_kmeans_digits.yaml", "test_federated_kmeans.py"]


def test_the_test_on_the_methods_page_passes(example_folder):
    module = importlib.import_module("test_federated_kmeans")
    tests = [function for name, function in inspect.getmembers(module, inspect.isfunction) if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile_and_use_names_that_exist(page):
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")
        for package, name in re.findall(r"\b(fedclust|lightning_modules)\.([A-Za-z_]\w*)", text):
            module = importlib.import_module(package)
            is_package = (ROOT / package / name).is_dir() or (ROOT / package / f"{name}.py").is_file()
            assert is_package or hasattr(module, name), f"{page.name} uses {package}.{name}, which does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


def test_the_readme_has_the_two_commands():
    text = (ROOT / "README.md").read_text()
    block = text.split("## The two commands\n", 1)[1].split("```bash\n", 1)[1].split("```", 1)[0]
    assert block.splitlines() == [
        "pip install -e . && fedclust fit --config configs/feddcn_digits.yaml",
        "pip install -e '.[test]' && pytest",
    ]
