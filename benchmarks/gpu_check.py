"""Every method for a few rounds on a GPU in 32-true, bf16-mixed and 16-mixed, beside the CPU in float32.

    python benchmarks/gpu_check.py                       # digits, a few minutes
    python benchmarks/gpu_check.py --dataset fashion_mnist --methods FedDCN,FedAvg --rounds 3
    python benchmarks/gpu_check.py --methods FedAvg,FLAMECHE --rounds 1 --out /tmp/try

Prints, per method and precision: rounds per second, peak memory of the device, the largest difference of the last
round's metrics to the CPU's, and whether everything stayed finite. Exit code 1 if a run failed, a metric is not finite,
or a float32 run on the GPU is further from the CPU's than --tolerance in accuracy. Backends: InProcess, and Vectorised
for the methods that it can do. Without a GPU only the CPU rows are run, so the script itself can be tried anywhere.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import pytorch_lightning as pl
import torch

import fedclust
from lightning_modules import DCN, Classifier, FLAMECHEClient, FMCLClient, PrivateAdaptiveClient

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
# Metrics that are shares or indices of comparable size; the others are losses and counts.
COMPARED = ("acc", "acc_mean", "acc_pooled", "nmi", "ari", "f1_macro")


def methods(images: bool) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Name → algorithm and client."""
    network = "cnn" if images else "small_cnn"
    settings: dict[str, Any] = {"lr": 0.1, "batch_size": 32}
    quick = {"pretrain_epochs": 3, "cluster_epochs": 2, "round_epochs": 2, "n_synthetic": 1000}
    return {
        "FedDCN": lambda: (fedclust.FedDCN(**quick), DCN(10, [128, 64], 8, lr=1e-3, batch_size=64)),
        "FedAvg": lambda: (fedclust.FedAvg(2), Classifier(network, **settings)),
        "LocalOnly": lambda: (fedclust.LocalOnly(2), Classifier(network, **settings)),
        "PA-CFL": lambda: (
            fedclust.PrivateAdaptiveCFL(round_epochs=2, top_k=0.01, similarity="index_overlap", privacy=False),
            PrivateAdaptiveClient(network, **settings),
        ),
        "FMCL": lambda: (fedclust.FMCL(2), FMCLClient(network=network, **settings)),
        "FLAMECHE": lambda: (fedclust.FLAMECHE(2, round_epochs=2), FLAMECHEClient(network, **settings)),
    }


def run(method: str, backend: str, accelerator: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run: time, memory, metrics."""
    algorithm, client = methods(options.dataset != "digits")[method]()
    partition = fedclust.Dirichlet(options.clients, 0.5, min_size=60)
    data = fedclust.FederatedDataModule(options.dataset, partition, root=options.root, seed=0)
    if accelerator == "gpu":
        torch.cuda.reset_peak_memory_stats()
    loop = fedclust.FederatedLoop(algorithm, client, getattr(fedclust, backend)())
    trainer = pl.Trainer(
        max_epochs=options.rounds, accelerator=accelerator, devices=1, precision=precision,  # type: ignore[arg-type]
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    start = time.perf_counter()
    trainer.fit(loop, datamodule=data)
    trainer.test(loop, datamodule=data, verbose=False)
    spent = loop.seconds.get("train", time.perf_counter() - start)
    metrics = {name.removeprefix("test/"): value for name, value in loop.latest.items() if name.startswith("test/")}
    peak = torch.cuda.max_memory_allocated() / 1e6 if accelerator == "gpu" else float("nan")
    return {"rounds_per_second": options.rounds / spent, "peak_mb": peak, "metrics": metrics}


def difference(found: dict[str, float], expected: dict[str, float]) -> float:
    """Largest difference of the compared metrics."""
    names = [name for name in COMPARED if name in found and name in expected]
    return max((abs(found[name] - expected[name]) for name in names), default=float("nan"))


def check(method: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one method."""
    expected = run(method, "InProcess", "cpu", "32-true", options)
    cases = [("InProcess", "cpu", "32-true")]
    if torch.cuda.is_available():
        cases += [("InProcess", "gpu", precision) for precision in PRECISIONS]
        cases += [("Vectorised", "gpu", precision) for precision in PRECISIONS if precision != "16-mixed"]
    rows = []
    for backend, accelerator, precision in cases:
        row: dict[str, Any] = {"method": method, "backend": backend, "device": accelerator, "precision": precision}
        try:
            found = expected if accelerator == "cpu" else run(method, backend, accelerator, precision, options)
        except Exception as error:  # a method that cannot run must not hide the others
            rows.append({**row, "error": f"{type(error).__name__}: {error}", "ok": False})
            continue
        off = difference(found["metrics"], expected["metrics"])
        finite = all(math.isfinite(value) for name, value in found["metrics"].items() if name in COMPARED)
        near = precision != "32-true" or not off > options.tolerance
        rows.append({**row, **found, "difference": off, "ok": finite and near})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: CPU rows only"
    lines = [f"# Methods on {device}", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    lines += [
        "| method | backend | device | precision | rounds/s | peak MB | difference to the CPU | |",
        "|" + "---|" * 8,
    ]
    for row in rows:
        first = f"| {row['method']} | {row['backend']} | {row['device']} | {row['precision']} |"
        if "error" in row:
            lines.append(f"{first} {row['error'][:160]} |")
            continue
        shown = f"{row['rounds_per_second']:.3g} | {row['peak_mb']:.0f} | {row['difference']:.4f}"
        lines.append(f"{first} {shown} | {'ok' if row['ok'] else 'NOT OK'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--methods", type=common.words, default=list(methods(images=False)))
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--root", help="folder of the data; default: where the library looks")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    common.quiet()
    rows = []
    for method in options.methods:
        rows += check(method, options)
        for row in rows[-1:]:
            print({name: value for name, value in row.items() if name != "metrics"}, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    common.write_json(options.out / "gpu_check.json", {"rows": rows, "versions": common.versions()})
    (options.out / "gpu_check.md").write_text(markdown(rows))
    print(markdown(rows))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
