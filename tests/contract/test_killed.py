"""Every method: killed with SIGKILL in the middle of a round and resumed, a run ends with the same bits."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os, pickle, signal, sys
import pytorch_lightning as pl
import torch

method, data, folder = pickle.loads(bytes.fromhex(sys.stdin.read()))
torch.set_num_threads(1)

from fedclust.federation.loop import FederatedLoop
from pytorch_lightning.callbacks import ModelCheckpoint


class Die(pl.Callback):
    def on_train_batch_start(self, trainer, loop, batch, batch_idx):
        if trainer.current_epoch == 2:
            run = loop.backend.run

            def die(*question):
                for outcome in run(*question):
                    os.kill(os.getpid(), signal.SIGKILL)
                    yield outcome

            loop.backend.run = die


keeper = ModelCheckpoint(folder, filename="best", save_last=True, enable_version_counter=False)
trainer = pl.Trainer(max_epochs=4, accelerator="cpu", logger=False, num_sanity_val_steps=0, callbacks=[keeper, Die()],
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(FederatedLoop(*method), datamodule=data)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_killed_in_a_round_and_resumed_is_equal(run: Any, method: Any, blobs: Any, tmp_path: Path) -> None:
    expected = run(4)
    job = pickle.dumps(((method.algorithm(), method.client()), blobs(), str(tmp_path / "killed"))).hex()
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=job,
        text=True,
        capture_output=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    rest = run(4, folder="rest", resume=tmp_path / "killed" / "last.ckpt")
    assert rest.bits() == expected.bits()
    assert rest.metrics() == expected.metrics()
