"""The command line: help, printed configurations, numbers, and errors in one paragraph before any training."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fedclust.cli import COMMANDS, main

ALGORITHM = "--model.init_args.algorithm.init_args."
CLIENT = "--model.init_args.client.init_args."
PARTITION = "--data.init_args.partition.init_args."
RUNNING = [name for name in COMMANDS if name not in ("configs", "tune")]


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--print_config"],
        ["--config", "feddcn_digits", "--print_config"],
        ["--model", "lightning_modules.DCN", "--data", "fedclust.FederatedDataModule", "--print_config"],
        ["--model.help", "fedclust.FederatedLoop"],
        ["--data.help", "fedclust.FederatedDataModule"],
    ],
)
def test_help_and_printed_configuration(command, name, arguments):
    ran = command(name, *arguments)
    assert ran.code == 0
    assert ran.out
    assert not ran.err
    assert not Path("runs").exists()


def test_command_list_and_version(command):
    assert command("--help").out.count("\n  ") == len(COMMANDS)
    assert command("configs", "--help").code == 0
    assert command("--version").out.startswith("fedclust ")
    assert command().code == 2
    unknown = command("train")
    assert (unknown.code, "'train' is no command" in unknown.err) == (2, True)


def test_help_is_quick_to_load():
    code = (
        "import sys\nfrom fedclust.cli import main\n"
        "assert main(['fit', '--config', 'feddcn_digits', '--print_config']) == 0\n"
        "assert not {'umap', 'numba', 'sklearn', 'pynndescent', 'optuna'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["1e-4", "1e4", "1E-4", "1", ".5"])
def test_numbers_are_floats_in_yaml_and_on_the_command_line(command, tmp_path, text):
    base = yaml.safe_load(command("fit", "--config", "feddcn_digits", "--print_config").out)
    (tmp_path / "own.yaml").write_text(
        f"model:\n  class_path: fedclust.FederatedLoop\n  init_args:\n    participation: {text}\n"
        f"    algorithm: {{class_path: fedclust.FedDCN,"
        f" init_args: {{recon_weight: {text}, geometry_pretrain: {text}}}}}\n"
        f"    client: {{class_path: lightning_modules.DCN, init_args: {{lr: {text}, max_grad_norm: {text}}}}}\n"
        f"data: {{class_path: fedclust.FederatedDataModule, init_args: {{partition: {{class_path: fedclust.Dirichlet,"
        f" init_args: {{n_clients: 5, alpha: {text}}}}}}}}}\n"
    )
    flags = [
        f"{ALGORITHM}recon_weight={text}",
        f"{ALGORITHM}geometry_pretrain={text}",
        f"{CLIENT}lr={text}",
        f"{CLIENT}max_grad_norm={text}",
        "--model.init_args.participation=" + text,
        f"{PARTITION}alpha={text}",
    ]
    for arguments in (["--config", str(tmp_path / "own.yaml")], ["--config", "feddcn_digits", *flags]):
        ran = command("fit", *arguments, "--print_config")
        assert ran.code == 0, ran.err
        config = yaml.safe_load(ran.out)
        model = config["model"]["init_args"]
        found = [
            model["participation"],
            model["algorithm"]["init_args"]["recon_weight"],
            model["algorithm"]["init_args"]["geometry_pretrain"],
            model["client"]["init_args"]["lr"],
            model["client"]["init_args"]["max_grad_norm"],
            config["data"]["init_args"]["partition"]["init_args"]["alpha"],
        ]
        assert all(type(value) is float and value == float(text) for value in found), found
    assert base["model"]["init_args"]["participation"] is None


WRONG = {
    "no model": ([], ["needs a configuration", "--config"]),
    "unknown configuration": (["--config", "nothing"], ["'nothing'", "feddcn_digits"]),
    "unknown flag": (["--config", "feddcn_digits", "--trainer.nope=1"], ["--trainer.nope"]),
    "unknown key": ([f"{ALGORITHM}nope=1"], ["fedclust.FedDCN", "'nope'"]),
    "wrong type": ([f"{ALGORITHM}n_synthetic=abc"], ["n_synthetic", "int", "abc"]),
    "wrong optional type": ([f"{CLIENT}max_grad_norm=abc"], ["max_grad_norm", "float", "abc"]),
    "wrong choice": ([f"{ALGORITHM}sampling=round"], ["sampling", "'isotropic', 'diagonal'", "round"]),
    "bad value": ([f"{ALGORITHM}recon_weight=-1"], ["recon_weight", "at least 0", "-1"]),
    "bad cohort": (["--model.init_args.cohort_size=7"], ["cohort_size", "7", "5 clients"]),
    "unknown class": (["--model", "nowhere.Loop"], ["nowhere.Loop"]),
    "unknown partition": (["--data.init_args.partition", "fedclust.Dirichle"], ["Dirichle"]),
    "K above rows": ([f"{CLIENT}n_clusters=400"], ["client", "training rows", "n_clusters=400"]),
    "impossible min_size": ([f"{PARTITION}min_size=400"], ["1438 rows", "min_size=400", "2000"]),
    "bad alpha": ([f"{PARTITION}alpha=0"], ["alpha", "above 0", "0"]),
    "unknown source": (["--data.init_args.source=letters"], ["'letters'", "digits"]),
    "missing files": (["--data.init_args.source=mnist"], ["mnist", "train-images-idx3-ubyte", "data/MNIST/raw"]),
    "wrong precision": (["--trainer.precision=64-true"], ["64-true", "bf16-mixed"]),
    "unknown precision": (["--trainer.precision=half"], ["trainer.precision", "half", "bf16-mixed"]),
    "clipping": (["--trainer.gradient_clip_val=1.0"], ["trainer.gradient_clip_val", "max_grad_norm"]),
    "accumulation": (["--trainer.accumulate_grad_batches=2"], ["trainer.accumulate_grad_batches", "batch_size"]),
    "steps": (["--trainer.max_steps=5"], ["trainer.max_steps", "trainer.max_epochs"]),
    "devices": (["--trainer.devices=2"], ["trainer.devices", "devices=1"]),
    "bad seed": (["--seed_everything=-1"], ["seed_everything", "-1"]),
    "seed of another type": (["--seed_everything=true"], ["seed_everything", "int"]),
    "bad name": (["--name=a/b"], ["name", "'a/b'"]),
    "missing checkpoint": (["--ckpt_path=nowhere.ckpt"], ["--ckpt_path", "nowhere.ckpt"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_is_one_paragraph_before_any_training(command, case):
    arguments, words = WRONG[case]
    if arguments and "--config" not in arguments:
        arguments = ["--config", "feddcn_digits", *arguments]
    ran = command("fit", *arguments)
    assert ran.code == 2
    assert ran.err.startswith("fedclust fit: error: ")
    assert ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err
    for noise in ("Traceback", "Subtypes", "NestedArg", "Namespace", "<class"):
        assert noise not in ran.err
    assert not list(Path("runs").glob("**/*")), "a run that never began left something"


def test_wrong_yaml_names_the_key(command, tmp_path):
    good = command("fit", "--config", "feddcn_digits", "--print_config").out
    changes = {
        "n_synthetik": good.replace("n_synthetic", "n_synthetik"),
        "trainr": good.replace("trainer:", "trainr:"),
        "n_clients": re.sub(r"n_clients: \d+", "n_clients: 5.5", good),
        "lr": re.sub(r"\blr: \S+", "lr: fast", good),
        "parsing": "model: [1\n",
    }
    for word, text in changes.items():
        assert text != good
        (tmp_path / "own.yaml").write_text(text)
        ran = command("fit", "--config", "own.yaml")
        assert ran.code == 2
        assert word in ran.err
        assert ran.err.count("\n") == 1


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_evaluation_needs_a_checkpoint(command, name, tmp_path):
    ran = command(name, "--config", "feddcn_digits")
    assert ran.code == 2
    assert "--ckpt_path" in ran.err
    (tmp_path / "stray.ckpt").write_bytes(b"no checkpoint")
    assert "give --config too" in command(name, "--ckpt_path", "stray.ckpt").err
    ran = command(name, "--config", "feddcn_digits", "--ckpt_path", "stray.ckpt")
    assert (ran.code, "is damaged, no checkpoint, or holds objects" in ran.err) == (2, True)
    torch.save({"weights": torch.zeros(1)}, tmp_path / "stray.ckpt")
    ran = command(name, "--config", "feddcn_digits", "--ckpt_path", "stray.ckpt")
    assert (ran.code, "not written by a Trainer" in ran.err) == (2, True)
    assert not list(Path("runs").glob("**/*"))


def test_checkpoint_of_another_run_is_refused(quick_fit, command):
    ran = quick_fit("--trainer.max_epochs=1")
    last = str(ran.path / "checkpoints" / "last.ckpt")
    other_seed = command("test", "--ckpt_path", last, "--seed_everything=1")
    assert (other_seed.code, "seed 0, this run has 1" in other_seed.err) == (2, True)
    other_data = command("test", "--ckpt_path", last, f"{PARTITION}alpha=5")
    assert (other_data.code, "partition" in other_data.err) == (2, True)
    other_net = command("test", "--ckpt_path", last, f"{CLIENT}latent_dim=2")
    assert (other_net.code, "does not fit this model" in other_net.err) == (2, True)
    central = command("test", "--config", "dcn_digits_centralised", "--ckpt_path", last)
    assert central.code == 2
    assert [path.name for path in Path("runs").iterdir()] == ["feddcn_digits"]
    assert [path.name for path in ran.path.parent.iterdir()] == ["version_0"]


def test_debug_shows_the_traceback(command, monkeypatch):
    wrong = ("fit", "--config", "feddcn_digits", f"{PARTITION}min_size=400")
    with pytest.raises(ValueError, match="min_size=400"):
        main([*wrong, "--debug"])
    monkeypatch.setenv("FEDCLUST_DEBUG", "1")
    with pytest.raises(ValueError, match="min_size=400"):
        main(list(wrong))


def test_nothing_irrelevant_is_said(quick_fit):
    ran = quick_fit("--trainer.max_epochs=2")
    for line in ran.err.splitlines():
        assert line.startswith(("round ", "local DCN", "initialising", "note: ")), line


def test_two_processes_at_once_get_two_directories(quick, tmp_path):
    arguments = [
        sys.executable,
        "-m",
        "fedclust",
        "fit",
        "--config",
        "feddcn_digits",
        *quick,
        "--trainer.max_epochs=1",
    ]
    both = [subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    last = sorted(process.communicate(timeout=240)[0].rstrip().splitlines()[-1] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert last == [f"run: runs/feddcn_digits/version_{number}" for number in (0, 1)]


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import fedclust.cli.commands
    from fedclust.cli import main

    def interrupted(*arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(fedclust.cli.commands, "run_command", interrupted)
    assert main(["fit", "--config", "feddcn_digits"]) == 130
