"""Rounds per second beside the peers: the same work on the same machine, one system after the other.

    python benchmarks/rounds.py                                  # all tasks and systems; installs Flower in a venv
    python benchmarks/rounds.py --tasks tiny --systems InProcess,Vectorised,bare --rounds 3
    python benchmarks/rounds.py --tasks tiny --systems bare --precisions 32-true --rounds 2 --out /tmp/try

Tasks: feddcn (stage 3 on Fashion-MNIST, 5 clients, autoencoder 784-512-256-6, 5 epochs), cnn (CNN of 582,026 parameters
on Fashion-MNIST, 20 clients of 3,000 images, one epoch), tiny (100 clients of 14 digits, a small perceptron).
Systems: this library's InProcess, InProcess_2 (two threads), Processes, Vectorised; bare and bare_2 (a loop by hand in
plain PyTorch, one and two threads); Trainer (one Lightning Trainer per client and round); Flower (its simulation on Ray
with the usual DataLoader); products (feddcn only: the matrix products alone, at the same shapes and precision).

Each system runs in processes of its own. The first round is not counted: it starts workers and compiles. Of the others
the fastest counts, as load from outside only ever adds; CPU seconds are their mean. CPU seconds and memory
(proportional set size) are of the whole process tree, sampled. A second call keeps what an earlier one
measured on the same kind of machine, and measures anew what it is asked for. Peers do FedDCN's local training only;
this library's rows hold k-means on every client too. Figures need an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
import venv
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
import numpy as np
import psutil
import torch
from rounds_models import CLUSTERS, LATENT, TASKS, write_rows

import fedclust

HERE = Path(__file__).resolve().parent
SYSTEMS = (
    "InProcess", "InProcess_2", "Processes", "Vectorised", "bare", "bare_2", "Trainer", "Flower", "products",
)  # fmt: skip
ROUNDS = {"feddcn": 2, "cnn": 3, "tiny": 10}


class Meter:
    """CPU seconds and memory of a process and all its descendants, sampled in a thread."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seconds: dict[int, float] = {}
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def seconds(self) -> float:
        """CPU seconds so far, of processes that have ended too."""
        self._sample()
        return sum(self._seconds.values())

    def close(self) -> None:
        """Ends the sampling."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            self._sample()

    def _sample(self) -> None:
        memory = 0
        try:
            family = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                times = process.cpu_times()
                self._seconds[process.pid] = times.user + times.system
                memory += process.memory_full_info().pss
            except psutil.Error:
                continue
        self.peak = max(self.peak, memory)


def measure(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Runs a command that prints `ROUND n time`, and measures from its second round to its end."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=HERE
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        errors: list[str] = []
        threading.Thread(target=lambda: errors.append(run.stderr.read()), daemon=True).start()  # type: ignore[union-attr]
        meter, marks, used = Meter(run.pid), [], []
        for line in run.stdout:
            if line.startswith("ROUND"):
                marks.append(float(line.split()[2]))
                used.append(meter.seconds())
        run.wait()
        meter.close()
    if run.returncode != 0 or len(marks) < 3:
        return {"failed": "".join(errors)[-1500:] or f"exit code {run.returncode}"}
    seconds = [after - before for before, after in pairwise(marks[1:])]
    return {
        "rounds_per_second": 1 / min(seconds), "seconds_per_round": min(seconds), "all_seconds": seconds,
        "cpu_seconds_per_round": (used[-1] - used[1]) / len(seconds), "peak_mb": round(meter.peak / 1e6),
    }  # fmt: skip


def rows_of(task: str, folder: Path, root: str | None) -> Path:
    """Writes the rows of a task."""
    path = folder / f"rows_{task}.npz"
    if path.exists():
        return path
    settings = TASKS[task]
    source = "digits" if task == "tiny" else "fashion_mnist"
    per_client = {"tiny": 14, "cnn": 3000, "feddcn": 12000}[task]
    data = fedclust.FederatedDataModule(source, fedclust.Iid(1), root=root, seed=0, val_fraction=0.0)
    x, y = data.train.x.numpy(), data.train.y
    assert y is not None
    if task == "feddcn":
        x = x.reshape(len(x), -1)
    if task == "tiny":
        x = x.reshape(len(x), 64)
    parts = [slice(client * per_client, (client + 1) * per_client) for client in range(settings.clients)]
    extra = {}
    if task == "feddcn":
        draw = np.random.default_rng(0)
        extra = {
            "synthetic": draw.random((5000, 784), np.float32),
            "geometry": draw.standard_normal((5000, LATENT)).astype(np.float32),
            "centers": draw.standard_normal((CLUSTERS, LATENT)).astype(np.float32),
        }
    write_rows(path, [(x[part], y.numpy()[part]) for part in parts], extra)
    return path


def flower_python(folder: Path) -> str:
    """Python of an environment with Flower's simulation, which is made at the first call."""
    python = folder / "flower" / "bin" / "python"
    done = folder / "flower" / "done"
    if not done.exists():
        venv.create(folder / "flower", with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "-q", "flwr[simulation]>=1.20", f"torch=={torch.__version__}"]
        subprocess.run([part.partition("+")[0] for part in install], check=True)
        done.touch()
    return str(python)


def systems_of(task: str, asked: list[str]) -> list[str]:
    """The systems that can do a task."""
    return [system for system in asked if system != "products" or task == "feddcn"]


def run(task: str, system: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """One measurement."""
    rows, rounds = rows_of(task, options.work, options.root), (options.rounds or ROUNDS[task]) + 1
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(common.ROOT)])}
    if system.endswith("_2"):
        environment.pop("OMP_NUM_THREADS", None)
    if system == "Flower":
        environment |= {"PYTHONPATH": str(HERE), "RAY_DEDUP_LOGS": "0", "FLWR_TELEMETRY_ENABLED": "0"}
        arguments = [flower_python(options.work), "rounds_flower.py", task, str(rows), str(rounds), "1"]
        return measure(arguments, environment)
    arguments = [sys.executable, "rounds_work.py", system, task, str(rows), str(rounds), precision]
    return measure(arguments, environment)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    half = "yes" if common.fast_precision() == "bf16-mixed" else "no"
    return {
        "processor": model, "cores": os.cpu_count(), "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "bfloat16 instructions": half, "load at the start": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def resumed(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """The report with the runs that an earlier call measured on such a machine."""
    if path.exists():
        earlier = json.loads(path.read_text())
        if earlier["machine"]["processor"] == report["machine"]["processor"]:
            report["runs"] = earlier["runs"]
    return report


def counted(row: dict[str, Any]) -> str:
    """Which of the rounds the figures are of."""
    return f"fastest of {len(row['all_seconds'])}" if "all_seconds" in row else "mean"


def markdown(report: dict[str, Any]) -> str:
    """The table."""
    lines = ["# Rounds per second", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    lines += [f"Machine: {report['machine']}. Versions: {report['versions']}.", ""]
    lines += [
        "| task | system | precision | rounds/s | s/round | counted | CPU s/round | peak MB | to bare_2 | to Flower |"
    ]
    lines += ["|" + "---|" * 10]
    for name, row in report["runs"].items():
        task, system, precision = name.split("/")
        if "failed" in row:
            lines.append(f"| {task} | {system} | {precision} | failed: {row['failed'].strip().splitlines()[-1][:80]} |")
            continue
        shown = [f"{row['rounds_per_second']:.3g}", f"{row['seconds_per_round']:.3g}", counted(row)]
        shown += [f"{row['cpu_seconds_per_round']:.3g}", str(row["peak_mb"])]
        for peer in ("bare_2", "Flower"):
            other = report["runs"].get(f"{task}/{peer}/32-true", {})
            ratio = row["rounds_per_second"] / other["rounds_per_second"] if "rounds_per_second" in other else None
            shown.append("" if ratio is None else f"{ratio:.2f}")
        lines.append(common.row([task, system, precision, *shown]))
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=common.words, default=list(TASKS))
    parser.add_argument("--systems", type=common.words, default=list(SYSTEMS))
    parser.add_argument("--precisions", type=common.words, default=sorted({"32-true", common.fast_precision()}))
    parser.add_argument("--rounds", type=int, help="rounds that count; default: feddcn 2, cnn 3, tiny 10")
    parser.add_argument("--root", help="folder of the data; default: where the library looks")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--work", type=Path, default=common.WORK)
    parser.add_argument("--table", action="store_true", help="only write the Markdown from the JSON")
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes."""
    options = parse()
    path = options.out / "rounds.json"
    report = json.loads(path.read_text()) if options.table else measured(path, options)
    path.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


def measured(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs all that was asked for; the JSON is written after each."""
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    report = resumed(path, {"machine": machine(), "versions": common.versions(), "runs": {}})
    for task in options.tasks:
        for precision in options.precisions:
            for system in systems_of(task, options.systems):
                if system == "Flower" and precision != "32-true":
                    continue  # its examples train in float32
                start = time.perf_counter()
                found = run(task, system, precision, options)
                report["runs"][f"{task}/{system}/{precision}"] = found
                print(task, system, precision, found, f"{time.perf_counter() - start:.0f} s", flush=True)
                common.write_json(path, report)
    return report


if __name__ == "__main__":
    main()
