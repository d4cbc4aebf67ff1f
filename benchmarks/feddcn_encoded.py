"""FedDCN on features of a frozen encoder: Fashion-MNIST through EfficientNet-Lite0, beside pixels and the paper.

    python benchmarks/feddcn_encoded.py --scenarios iid,noniid --clients 5,20 --seeds 0,1 --rounds 40
    python benchmarks/feddcn_encoded.py --table

Settings are those of configs/feddcn_fashion_encoded.yaml; iid is Dirichlet 1000, noniid Dirichlet 0.5. Runs stop and
are selected by the label-free validation Davies-Bouldin index, as in reproduce_feddcn.py, whose results are the rows
"on pixels". k-means: scikit-learn's on the pooled training features, ten starts, test rows assigned to its centres.
Committed runs end after 40 rounds at most. The encoder needs pip install 'fedclust[encoders]'; its features take some
minutes, once (kept in $FEDCLUST_CACHE).
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
import yaml
from feddcn_table import PAPER
from reproduce_feddcn import History, Monitor, chosen
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score

from fedclust import Dirichlet, Encoded, FedDCN, FederatedDataModule, FederatedLoop, InProcess, clustering_accuracy
from lightning_modules import DCN
from lightning_modules.encoders import EfficientNetLite0

CONFIG = common.ROOT / "configs" / "feddcn_fashion_encoded.yaml"
ALPHA = {"iid": 1000.0, "noniid": 0.5}


def settings() -> dict[str, Any]:
    """The parsed configuration."""
    return dict(yaml.safe_load(CONFIG.read_text()))


def data_module(options: argparse.Namespace, scenario: str, clients: int, seed: int) -> FederatedDataModule:
    """Features of all rows, dealt to the clients."""
    arguments = settings()["data"]["init_args"]["source"]["init_args"]
    encoder = EfficientNetLite0(**arguments["encoder"]["init_args"])
    source = Encoded(options.dataset, encoder, root=options.root, n_components=arguments["n_components"])
    dealt = Dirichlet(clients, ALPHA[scenario], min_size=30)
    return FederatedDataModule(source, dealt, seed=seed, scale="none")


def run(options: argparse.Namespace, scenario: str, clients: int, seed: int, work: Path) -> dict[str, Any]:
    """One run of FedDCN."""
    config = settings()["model"]["init_args"]
    loop = FederatedLoop(
        FedDCN(**config["algorithm"]["init_args"]), DCN(**config["client"]["init_args"]), InProcess(threads=1)
    )
    free, labelled = Monitor("val/dbi", -1, options.patience), Monitor("val/acc", +1, options.patience)
    history = History([free, labelled])
    trainer = common.make_trainer(options.rounds, options.precision, work, [history])
    data = data_module(options, scenario, clients, seed)
    trainer.fit(loop, datamodule=data, ckpt_path=common.checkpoint_in(work))
    return {
        "method": "FedDCN on features", "scenario": scenario, "clients": clients, "seed": seed,
        **chosen(history, free, uses_labels=False), "label_based": chosen(history, labelled, uses_labels=True),
        "seconds": round(sum(loop.seconds.values()), 1), "precision": options.precision, "notes": loop.notes,
        "versions": common.versions(), "history": history.rows,
    }  # fmt: skip


def central_kmeans(options: argparse.Namespace, seed: int, work: Path) -> dict[str, Any]:
    """k-means on the pooled training features."""
    data = data_module(options, "iid", 5, seed)
    model = KMeans(10, n_init=10, random_state=seed).fit(data.train.x.flatten(1).numpy())
    assigned, labels = model.predict(data.test.x.flatten(1).numpy()), data.test.y
    assert labels is not None
    return {
        "method": "central k-means on features", "scenario": "central", "clients": 1, "seed": seed,
        "acc": round(clustering_accuracy(labels.numpy(), assigned), 4),
        "nmi": round(float(normalized_mutual_info_score(labels.numpy(), assigned)), 4), "versions": common.versions(),
    }  # fmt: skip


def table(folder: Path) -> str:
    """The Markdown table, from all JSONs in the folder."""
    cells: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("feddcn_encoded_*.json")):
        read = json.loads(path.read_text())
        cells.setdefault((read["scenario"], read["clients"], read["method"]), []).append(read)
    for path in sorted(folder.glob("feddcn_fashion_mnist_*_paper_*.json")):
        read = json.loads(path.read_text())
        cells.setdefault((read["scenario"], read["clients"], "FedDCN on pixels"), []).append(read)
    lines = ["# FedDCN on features of a frozen encoder", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    lines += ["| scenario | clients | method | seeds | ACC | NMI | rounds | paper's mean ACC, NMI (pixels) |"]
    lines += ["|" + "---|" * 8]
    for (scenario, clients, method), runs in sorted(cells.items()):
        paper = PAPER.get(("fashion_mnist", scenario, clients))
        shown = f"{paper[1]}, {paper[3]}" if paper else ""
        figures = [common.spread([read[name] for read in runs]) for name in ("acc", "nmi")]
        rounds = ", ".join(str(read["rounds"]) for read in runs if "rounds" in read)
        seeds = ",".join(str(read["seed"]) for read in runs)
        lines.append(common.row([scenario, clients, method, seeds, *figures, rounds, shown]))
    text = "\n".join(lines) + "\n"
    (folder / "feddcn_encoded.md").write_text(text)
    return text


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion_mnist")
    parser.add_argument("--scenarios", type=common.words, default=["iid", "noniid"])
    parser.add_argument("--clients", type=common.integers, default=[5, 20])
    parser.add_argument("--seeds", type=common.integers, default=[0, 1])
    parser.add_argument("--rounds", type=int, default=75)
    parser.add_argument("--patience", type=int, default=15)
    parser.add_argument("--precision", default=common.fast_precision())
    parser.add_argument("--root", help="folder of the data; default: where the library looks")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--work", type=Path, default=common.WORK)
    parser.add_argument("--table", action="store_true", help="only write the table from the JSONs")
    return parser.parse_args()


def main() -> None:
    """Runs what is missing and writes the table."""
    options = parse()
    common.quiet()
    torch.set_num_threads(1)
    for seed in [] if options.table else options.seeds:
        path = options.out / f"feddcn_encoded_central_{seed}.json"
        common.run_once(path, options.work, partial(central_kmeans, options, seed))
        for scenario in options.scenarios:
            for clients in options.clients:
                path = options.out / f"feddcn_encoded_{scenario}_{clients}_{seed}.json"
                result = common.run_once(path, options.work, partial(run, options, scenario, clients, seed))
                if result is not None:
                    print(path.name, result["acc"], result["nmi"], flush=True)
    print(table(options.out))


if __name__ == "__main__":
    main()
