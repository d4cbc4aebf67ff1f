"""Where FedDCN's time goes, and what the library's local loop costs beside a bare PyTorch loop.

    python benchmarks/profile_feddcn.py                       # stages and rounds, matrix products, loop against loop
    python benchmarks/profile_feddcn.py --dataset digits      # the same on a small data set
    python benchmarks/profile_feddcn.py --dataset digits --pairs 1 --rows 64 --skip-stages --out /tmp/try

Prints, for float32 and bf16-mixed on 1 and 2 threads: seconds per stage and per round, the share of a local step that
is inside matrix products (the profiler's own time of mm and addmm), and the library's local loop against a bare loop
over the same batches (pairs run in turn in this process; the median of the ratios). Writes a JSON beside the others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import common
import pytorch_lightning as pl
import torch
from feddcn_cells import settings
from reproduce_feddcn import versions
from torch.profiler import ProfilerActivity, profile

from fedclust import Dirichlet, FedDCN, FederatedDataModule, FederatedLoop, InProcess
from fedclust.federation.batches import Cycle, gathered, shuffled_batches
from fedclust.federation.context import WorkContext, make_fabric
from lightning_modules import DCN
from lightning_modules.dcn_plan import LossWeights

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


class LocalStep:
    """One client's local epoch of stage 3: fixed rows, real batches joined by synthetic ones, and the geometry term."""

    def __init__(self, client: dict[str, Any], algorithm: dict[str, Any], features: int, rows: int, precision: str):
        self.module = DCN(**client)
        self.module.build((features,), None)
        self.module.initialize(0)
        self.weights = LossWeights(
            algorithm["recon_weight"], algorithm["cluster_weight"], algorithm["geometry_federated"]
        )
        draw = torch.Generator().manual_seed(0)
        synthetic, latent = algorithm["n_synthetic"], self.module.latent_dim
        self.x = torch.rand(rows, features, generator=draw)
        self.synthetic = torch.rand(synthetic, features, generator=draw)
        self.geometry = torch.randn(synthetic, latent, generator=draw)
        self.ctx = WorkContext("client 0", 1, 0, make_fabric(torch.device("cpu"), precision))

    def batches(self, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of one epoch, the same at every call."""
        join, embed = Cycle(len(self.synthetic), self.ctx.rng("a")), Cycle(len(self.synthetic), self.ctx.rng("b"))
        for rows in shuffled_batches(len(self.x), self.module.batch_size, self.ctx.rng("c")):
            drawn = embed.take(len(rows))
            yield {
                "x": gathered((self.x, rows), (self.synthetic, join.take(len(rows)))),
                "geometry_x": gathered((self.synthetic, drawn)),
                "target": gathered((self.geometry, drawn)),
            }

    def library(self) -> int:
        """One epoch through `fit_locally`."""
        weights = self.weights
        fit = self.module.fit_locally(
            self.ctx, 1, batches=self.batches, loss=lambda batch: self.module.terms(batch, weights)
        )
        return fit.n_steps

    def bare(self) -> int:
        """The same epoch as one would write it by hand."""
        module, half = self.module, self.ctx.precision == "bf16-mixed"
        optimizer = torch.optim.Adam(module.parameters(), lr=module.lr, fused=True)
        module.train()
        steps = 0
        for batch in self.batches(0):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = module.terms(batch, self.weights)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), module.max_grad_norm)
            optimizer.step()
            steps += 1
        return steps


def compare(step: LocalStep, pairs: int) -> dict[str, float]:
    """Milliseconds per step of both loops and the median of their ratios."""
    step.library(), step.bare()
    times: list[tuple[float, float]] = []
    for pair in range(pairs):
        order = (step.library, step.bare) if pair % 2 == 0 else (step.bare, step.library)
        spent = {}
        for run in order:
            start = time.perf_counter()
            steps = run()
            spent[run.__name__] = (time.perf_counter() - start) / steps * 1e3
        times.append((spent["library"], spent["bare"]))
    return {
        "library_ms": round(median(own for own, _ in times), 3),
        "bare_ms": round(median(bare for _, bare in times), 3),
        "ratio": round(median(own / bare for own, bare in times), 4),
    }


def share_of_products(step: LocalStep) -> float:
    """Share of the profiler's own time that is inside matrix products."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step.library()
    events = recorded.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    inside = sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS)
    return round(inside / total, 3)


def stages(config: dict[str, Any], dataset: str, root: str | None, precision: str, threads: int, rounds: int) -> dict:
    """Seconds per stage of a short run at full size: one epoch of each kind in stages 1 and 2, then some rounds."""
    loop_args, data_args = config["model"]["init_args"], config["data"]["init_args"]
    algorithm = {**loop_args["algorithm"]["init_args"], "pretrain_epochs": 1, "cluster_epochs": 1}
    data = FederatedDataModule(dataset, Dirichlet(**data_args["partition"]["init_args"]), root=root, seed=0)
    loop = FederatedLoop(FedDCN(**algorithm), DCN(**loop_args["client"]["init_args"]), InProcess(threads=threads))
    trainer = pl.Trainer(
        max_epochs=rounds, accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(loop, datamodule=data)
    return {name: round(value, 2) for name, value in loop.seconds.items()}


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion_mnist", choices=("mnist", "fashion_mnist", "digits"))
    parser.add_argument("--scenario", default="iid", choices=("iid", "noniid"))
    parser.add_argument("--root")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=10800, help="rows of the client in the loop comparison")
    parser.add_argument("--skip-stages", action="store_true")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    common.quiet()
    native = common.fast_precision() == "bf16-mixed"
    config = settings(options.dataset, options.scenario)
    arguments = config["model"]["init_args"]
    features = 64 if options.dataset == "digits" else 784
    results = []
    for threads in (1, 2):
        for precision in ("32-true", "bf16-mixed") if native else ("32-true",):
            torch.set_num_threads(threads)
            step = LocalStep(
                arguments["client"]["init_args"], arguments["algorithm"]["init_args"], features, options.rows, precision
            )
            row: dict[str, Any] = {"threads": threads, "precision": precision, **compare(step, options.pairs)}
            row["products"] = share_of_products(step)
            if not options.skip_stages:
                row["stages"] = stages(config, options.dataset, options.root, precision, threads, options.rounds)
            results.append(row)
            print(row, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"profile_feddcn_{options.dataset}{'' if native else '_no_bf16'}.json"
    common.write_json(path, {"rounds": options.rounds, "rows": results, "versions": versions()})


if __name__ == "__main__":
    main()
