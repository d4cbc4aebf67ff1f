"""The code that the documentation shows runs, the names and links in it exist."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml
from sklearn.cluster import KMeans

import fedclust
import lightning_modules
from fedclust import Dirichlet, FederatedDataModule, FederatedLoop

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
METHODS_PAGE = ROOT / "docs" / "adding_a_method.md"
FENCE = re.compile(r"(?:^<!-- example: (?P<file>\S+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def blocks(page: Path, language: str) -> list[str]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [match["text"] for match in found if match["language"] == language]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """A folder with the marked blocks of the methods page as files, importable."""
    marked = {m["file"]: m["text"] for m in FENCE.finditer(METHODS_PAGE.read_text(encoding="utf-8")) if m["file"]}
    assert list(marked) == [
        "kmeans_client.py",
        "federated_kmeans.py",
        "fed_kmeans_digits.yaml",
        "run_it.py",
        "test_federated_kmeans.py",
        "damped.py",
    ]
    for name, text in marked.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in marked:
        sys.modules.pop(Path(name).stem, None)


def test_the_test_on_the_methods_page_passes(example):
    module = importlib.import_module("test_federated_kmeans")
    tests = [function for name, function in inspect.getmembers(module, inspect.isfunction) if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


def test_the_variant_goes_half_the_way(example):
    damped = importlib.import_module("damped").Damped
    data = FederatedDataModule(source="digits", partition=Dirichlet(3, 0.5, min_size=30), seed=0)
    before, whole, half = (
        fedclust.federate(method(), lightning_modules.Classifier("small_cnn", lr=lr), data, rounds=1, progress=False)
        for method, lr in ((fedclust.FedAvg, 1e-12), (fedclust.FedAvg, 0.05), (damped, 0.05))
    )
    for name, start in before.state.weights.items():
        expected = (start + whole.state.weights[name]) / 2
        torch.testing.assert_close(half.state.weights[name], expected, atol=1e-6, rtol=0)


def test_the_readmes_python_runs(monkeypatch, tmp_path):
    """All blocks in their order, in one namespace, with methods that are quick."""
    monkeypatch.chdir(tmp_path)
    federate, arrays = fedclust.federate, [torch.rand(40, 6).numpy() for _ in range(2)]

    def quick(algorithm, client, data, rounds, **options):
        for name in ("pretrain_epochs", "cluster_epochs", "round_epochs"):
            if hasattr(algorithm, name):
                setattr(algorithm, name, 1)
        if isinstance(algorithm, fedclust.FedDCN):
            algorithm.geometry_pretrain = algorithm.geometry_federated = 0.0
        return federate(algorithm, client, data, 1, progress=False, **options)

    monkeypatch.setattr(fedclust, "federate", quick)
    monkeypatch.setattr(fedclust, "cluster", lambda clients, n_clusters, **options: [n_clusters for _ in clients])
    namespace = {"list_of_arrays": arrays}
    for text in blocks(ROOT / "README.md", "python"):
        exec(compile(text, "README.md", "exec"), namespace)
    assert namespace["group"] in set(namespace["grouped"].assignments.values())
    assert len(namespace["labels"]) == len(arrays)


def test_the_example_is_lloyds_algorithm_on_the_pooled_rows(example):
    server_side = importlib.import_module("federated_kmeans")
    client_side = importlib.import_module("kmeans_client")
    data = FederatedDataModule(source="digits", partition=Dirichlet(5, 0.5), seed=0)
    rows = data.train.x.flatten(1)
    # Pixels are multiples of 1/16: without the noise, rows would lie exactly between two centres.
    noise = torch.rand(10, 64, generator=torch.Generator().manual_seed(0))
    start = rows[:: len(rows) // 10][:10] + 0.01 * noise

    class FromGivenCentres(server_side.FederatedKMeans):
        def start(self, server):
            return server_side.KMeansState(start)

    loop = FederatedLoop(FromGivenCentres(), client_side.KMeansClient(n_clusters=10))
    trainer = pl.Trainer(
        max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(loop, datamodule=data)

    pooled = KMeans(10, init=start.double().numpy(), n_init=1, max_iter=5, tol=0.0, algorithm="lloyd")
    pooled.fit(rows.double().numpy())
    expected = torch.from_numpy(pooled.cluster_centers_)
    torch.testing.assert_close(loop.state.centers.double(), expected, atol=1e-5, rtol=0)


def test_the_run_on_the_methods_page_predicts(example):
    module = importlib.import_module("run_it")
    assert module.labels.shape == (len(module.data.test),)
    assert set(module.labels.tolist()) == set(range(10))
    assert len(module.result.history) == 10
    # k-means on the raw pixels is known to get about .79; a broken assignment gets about .1 to .3.
    assert module.result.metrics["test/acc"] > 0.6


def test_the_configuration_on_the_methods_page_runs(example):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(example), str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "fedclust", "fit", "--config", "fed_kmeans_digits.yaml"]
    command += ["--trainer.max_epochs", "2"]
    done = subprocess.run(command, cwd=example, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "run: runs/fed_kmeans_digits/version_0"
    rounds = (example / "runs/fed_kmeans_digits/version_0/metrics.csv").read_text().splitlines()
    assert len(rounds) == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile_and_use_names_that_exist(page):
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")
        for package, name in re.findall(r"\b(fedclust|lightning_modules)\.([A-Za-z_]\w*)", text):
            home = ROOT / package
            submodule = (home / name).is_dir() or (home / f"{name}.py").is_file()
            assert submodule or hasattr(importlib.import_module(package), name), f"{package}.{name} does not exist"


def test_python_of_the_privacy_page_runs(capsys):
    for text in blocks(ROOT / "docs" / "privacy.md", "python"):
        exec(compile(text, "privacy.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "[6. 8.] (0, 2) [3. 4.]" in printed


@pytest.mark.parametrize("page", ["fmcl.md", "flameche.md", "pa_cfl.md"])
def test_python_of_the_methods_pages_runs(page):
    (text,) = blocks(ROOT / "docs" / page, "python")
    names = {}
    short = re.sub(r"rounds=\d+", "rounds=1", re.sub(r"round_epochs=\d+", "round_epochs=1", text))
    assert short != text
    exec(compile(short, page, "exec"), names)
    assert names["result"].assignments.keys() == set(range(20))
    assert len(names["classes"]) == len(names["images"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_class_paths_and_configurations_exist(page):
    text = page.read_text(encoding="utf-8")
    for config in re.findall(r"--config (?:configs/)?(\w+)(?:\.yaml)?(?=[\s`)])", text):
        known = (ROOT / "configs" / f"{config}.yaml").is_file() or config in ("my_experiment", "fed_kmeans_digits")
        assert known, f"{page.name} names the configuration {config}"
    for block in blocks(page, "yaml"):
        for path in re.findall(r"class_path: ([\w.]+)", str(yaml.safe_load(block)).replace("'", "")):
            package, _, name = path.rpartition(".")
            if package not in ("federated_kmeans", "kmeans_client"):
                assert hasattr(importlib.import_module(package), name), f"{page.name} names {path}"


def test_the_readme_has_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    below = text.split("## The two commands\n", 1)[1].lstrip("\n")
    assert below.startswith("```")  # where .ci/run reads them
    block = below.split("```", 2)[1]
    assert block.splitlines()[1:] == [
        "pip install -e . && fedclust fit --config configs/feddcn_digits.yaml",
        "pip install -e '.[test]' && pytest",
    ]
