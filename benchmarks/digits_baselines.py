"""What the digits' clusters are compared with: k-means on raw pixels, and the same network trained centrally.

    python benchmarks/digits_baselines.py --seeds 0,1,2,3,4

Both see the train rows of configs/dcn_digits_centralised.yaml and are measured on its test rows. k-means is fitted to
the train rows; a test row takes the nearest centre. The network is the configuration's, trained by a plain Trainer;
its best epoch is chosen by the validation rows' Davies-Bouldin index, which uses no labels. Writes
digits_baselines.json and .md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import common
import pytorch_lightning as pl
import yaml
from sklearn.cluster import KMeans

from fedclust import Dirichlet, FederatedDataModule
from fedclust.metrics import contingency_table, scores_from_contingency
from fedclust.report.selection import BestCheckpoint
from lightning_modules import DCN

CONFIG = common.ROOT / "configs" / "dcn_digits_centralised.yaml"
NAMES = ("acc", "nmi", "ari")


def data_of(config: dict[str, Any], seed: int) -> FederatedDataModule:
    """The configuration's rows; the partition matters only for which rows are validation rows."""
    given = config["data"]["init_args"]
    partition = Dirichlet(**given["partition"]["init_args"])
    return FederatedDataModule("digits", partition, batch_size=given["batch_size"], seed=seed)


def kmeans_on_pixels(data: FederatedDataModule, n_clusters: int, seed: int) -> dict[str, float]:
    """scikit-learn's k-means, ten starts."""
    model = KMeans(n_clusters, n_init=10, random_state=seed).fit(data.train.x.flatten(1).numpy())
    found = model.predict(data.test.x.flatten(1).numpy())
    assert data.test.y is not None
    true = data.test.y.numpy()
    return scores_from_contingency(contingency_table(true, found, int(true.max()) + 1, n_clusters))


def central(config: dict[str, Any], data: FederatedDataModule, seed: int) -> dict[str, float]:
    """The network under a plain Trainer."""
    pl.seed_everything(seed, verbose=False)
    module = DCN(**config["model"]["init_args"])
    with tempfile.TemporaryDirectory() as folder:
        best = BestCheckpoint(folder, "val/dbi")
        trainer = pl.Trainer(
            max_epochs=config["trainer"]["max_epochs"], precision=config["trainer"]["precision"], accelerator="cpu",
            logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            default_root_dir=folder, callbacks=[best],
        )  # fmt: skip
        trainer.fit(module, datamodule=data)
        (metrics,) = trainer.test(module, datamodule=data, ckpt_path=best.best_model_path, verbose=False)
    return {name: metrics[f"test/{name}"] for name in NAMES}


def write(rows: list[dict[str, Any]], out: Path) -> str:
    """The JSON and the table."""
    lines = common.heading(["method", "seeds", *(name.upper() for name in NAMES)])
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        cells = [common.spread([row[name] for row in own]) for name in NAMES]
        lines.append(common.row([method, ",".join(str(row["seed"]) for row in own), *cells]))
    title = "# Digits: what federated clusters are compared with\n\nTest split, mean ± sample standard deviation."
    written = "Written by `python benchmarks/digits_baselines.py`."
    text = "\n".join([title, written, "", *lines, ""])
    common.write_json(out / "digits_baselines.json", {"rows": rows, "versions": common.versions()})
    (out / "digits_baselines.md").write_text(text)
    return text


def main() -> None:
    """Runs both for every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=common.integers, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    common.quiet()
    config = yaml.safe_load(CONFIG.read_text())
    n_clusters, rows = config["model"]["init_args"]["n_clusters"], []
    for seed in options.seeds:
        data = data_of(config, seed)
        rows.append({"method": "k-means on pixels", "seed": seed, **kmeans_on_pixels(data, n_clusters, seed)})
        rows.append({"method": "DCN, central", "seed": seed, **central(config, data, seed)})
        print(rows[-2:], flush=True)
    print(write(rows, options.out))


if __name__ == "__main__":
    main()
