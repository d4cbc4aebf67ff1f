"""A source through an encoder, from a configuration: recorded, run again from the written one, changed on the line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fedclust.launch.configs import shipped_configs
from lightning_modules.encoders import RandomKaimingEncoder

SOURCE = "--data.init_args.source.init_args."


@pytest.fixture
def config(tmp_path: Path) -> str:
    """feddcn_digits on eight principal components of random features."""
    content = yaml.safe_load(shipped_configs()["feddcn_digits"].read_text())
    content["model"]["init_args"]["client"]["init_args"]["output"] = "linear"
    content["data"]["init_args"]["scale"] = "standard"
    content["data"]["init_args"]["source"] = {
        "class_path": "fedclust.Encoded",
        "init_args": {
            "source": "digits",
            "n_components": 8,
            "encoder": {
                "class_path": "lightning_modules.encoders.RandomKaimingEncoder",
                "init_args": {"size": 8, "feature_dim": 20},
            },
        },
    }
    path = tmp_path / "encoded.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_configuration_names_source_and_encoder(config, command, quick, tmp_path):
    ran = command("fit", "--config", config, "--trainer.max_epochs=1", *quick)
    assert ran.code == 0, ran.err
    record = ran.json("partition.json")
    assert record["encoder"] == {
        "source": "digits",
        "name": "random Kaiming",
        "fingerprint": RandomKaimingEncoder(size=8, feature_dim=20).fingerprint,
        "n_components": 8,
    }
    assert record["source"] == ran.json("summary.json")["source"] == "digits through random Kaiming"
    assert len(list((tmp_path / "cache").iterdir())) == 2

    again = command("fit", "--config", str(ran.path / "config.yaml"))
    assert again.code == 0, again.err
    assert again.json("partition.json") == record
    assert again.json("summary.json")["metrics"] == ran.json("summary.json")["metrics"]
    predicted = command("predict", "--ckpt_path", str(ran.path / "checkpoints" / "last.ckpt"))
    assert predicted.code == 0, predicted.err


def test_arguments_of_source_and_encoder_on_the_command_line(config, command, quick, tmp_path):
    changed = (f"{SOURCE}n_components=5", f"{SOURCE}cache_dir=null", f"{SOURCE}encoder.init_args.seed=4")
    ran = command("fit", "--config", config, "--trainer.max_epochs=1", *quick, *changed)
    assert ran.code == 0, ran.err
    record = ran.json("partition.json")["encoder"]
    assert record["n_components"] == 5
    assert record["fingerprint"] == RandomKaimingEncoder(4, size=8, feature_dim=20).fingerprint
    assert not (tmp_path / "cache").exists()


def test_a_wrong_argument_is_named(config, command):
    ran = command("fit", "--config", config, f"{SOURCE}n_components=0")
    assert ran.code != 0
    assert "n_components must be a whole number of at least 1, got 0" in ran.err
    ran = command("fit", "--config", config, f"{SOURCE}encoder=lightning_modules.encoders.TorchvisionEncoder")
    assert ran.code != 0
    assert "name" in ran.err
