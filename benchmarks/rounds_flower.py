"""One task of rounds.py under Flower's simulation; runs in an environment of its own, with flwr[simulation] and torch.

python rounds_flower.py TASK ROWS.npz ROUNDS THREADS
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import OrderedDict
from functools import lru_cache
from typing import Any

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from rounds_models import TASKS, joined, loss_of, network, optimizer, read_rows
from torch.utils.data import DataLoader, TensorDataset

# Ray's workers import this file as a module and have no command line of it, but inherit the environment.
TASK, ROWS = os.environ.get("ROUNDS_TASK", ""), os.environ.get("ROUNDS_ROWS", "")
ROUNDS, THREADS = int(os.environ.get("ROUNDS_ROUNDS", "0")), int(os.environ.get("ROUNDS_THREADS", "1"))


@lru_cache(maxsize=1)
def rows() -> Any:
    """The rows, read once per process."""
    return read_rows(ROWS)


class Client(NumPyClient):
    """The usual client: a DataLoader over a TensorDataset, one network per call."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fit(self, parameters: Any, config: Any) -> Any:
        """Local epochs from the received weights."""
        torch.set_num_threads(THREADS)
        (clients, extra), settings = rows(), TASKS[TASK]
        own = clients[self.number]
        model = network(TASK)
        names = model.state_dict().keys()
        model.load_state_dict(
            OrderedDict((name, torch.tensor(value)) for name, value in zip(names, parameters, strict=True))
        )
        loader = DataLoader(TensorDataset(own["x"], own["y"]), batch_size=settings.batch_size, shuffle=True)
        steps = optimizer(TASK, model)
        model.train()
        for _ in range(settings.epochs):
            for x, y in loader:
                steps.zero_grad()
                loss_of(TASK, model, joined(TASK, {"x": x, "y": y}, extra)).backward()
                steps.step()
        return [value.numpy() for value in model.state_dict().values()], len(own["x"]), {}


class Timed(FedAvg):
    """FedAvg that tells when a round begins."""

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Prints the time, then does what FedAvg does."""
        print(f"ROUND {server_round} {time.time()}", flush=True)
        return super().configure_fit(server_round, parameters, client_manager)


def server_fn(context: Context) -> ServerAppComponents:
    """All clients in every round, no evaluation."""
    weights = [value.numpy() for value in network(TASK).state_dict().values()]
    strategy = Timed(
        fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=TASKS[TASK].clients,
        min_available_clients=TASKS[TASK].clients, initial_parameters=ndarrays_to_parameters(weights),
    )  # fmt: skip
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))


def client_fn(context: Context) -> Any:
    """The client of a node."""
    return Client(int(context.node_config["partition-id"])).to_client()


def main() -> None:
    """Runs the simulation that the environment describes."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    resources = {"num_cpus": THREADS, "num_gpus": 0.0}
    run_simulation(
        ServerApp(server_fn=server_fn), ClientApp(client_fn=client_fn), num_supernodes=TASKS[TASK].clients,
        backend_config={"client_resources": resources, "init_args": {"num_cpus": os.cpu_count()}},
    )  # fmt: skip
    print(f"ROUND {ROUNDS + 1} {time.time()}", flush=True)


if __name__ == "__main__":
    names = ("ROUNDS_TASK", "ROUNDS_ROWS", "ROUNDS_ROUNDS", "ROUNDS_THREADS")
    os.environ |= dict(zip(names, sys.argv[1:], strict=True))
    # By the module's name, because what belongs to __main__ cannot be found by Ray's workers.
    import rounds_flower

    rounds_flower.main()
