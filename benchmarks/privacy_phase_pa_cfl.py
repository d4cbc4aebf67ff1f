"""What PA-CFL's privacy phase costs in bytes and seconds: one round of 20 users, beside the paper's Table 1.

    python benchmarks/privacy_phase_pa_cfl.py                     # all sizes, every user timed
    python benchmarks/privacy_phase_pa_cfl.py --timed-users 4     # four users timed, user side scaled up to all

Counted is all that lies between the local training and the clustering at the aggregation server, and the way back:

- user: `measure` (takes the gradient apart, norm of the less important part), `protect` (takes it apart, clip, noise),
  and putting the returned aggregate back into the order of the coordinates;
- servers: the bound from the norms, the shuffle inside groups of four, the ledger, and putting important and shuffled
  values together at the aggregation server;
- messages: ranking, norm, bound and ε₀, important and less important values (and BatchNorm buffers), what the
  management server passes on to the aggregation server, and the aggregate back to every user.

Not counted: local training, the permutation sequences and pre-clustering (their bytes are given beside), fine
clustering, averaging, and any network: everything runs in this process. Gradients are random vectors of the right
size; actions, servers and byte counts are the library's own. MB are 1e6 bytes.

Timed is one run per line: each stage of every timed user and of the servers once, with no mean and no best of several.
Where fewer users are timed than there are, the user side is scaled up to all of them; the servers always do all of
their work. A phase of 1,000 coordinates goes before, untimed: it compiles the kernels of noise and shuffle or loads
them from disk, once per process. Seconds are wall time on the given number of threads, the users one after the other;
processor time stands beside. Load and threads are written down.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common import RESULTS

from fedclust.algorithms.pa_cfl_servers import AggregationServer, ManagementServer, Router
from fedclust.data.tables import ClientData, Table
from fedclust.federation.client import parameter_count
from fedclust.federation.context import ClientContext, make_fabric
from fedclust.federation.message import Message, copied, message_bytes, value_bytes, with_prefix
from fedclust.privacy.importance import count_of, join_important
from fedclust.privacy.ledger import Ledger
from fedclust.privacy.randomness import random_source
from fedclust.random import torch_generator
from lightning_modules import PrivateAdaptiveClient

# Table 1: MB and seconds of PA-CFL.
PAPER = {"cnn": (884.84, 12.43), "resnet10": (746.60, 10.49)}
SHAPES = {"cnn": (1, 28, 28), "resnet10": (3, 32, 32)}
TEN_TIMES_CNN = 5_820_260
WARM_UP = 1000
TOP_K, EPSILON, DELTA, GROUP = 0.0025, 1.0, 1e-5, 4
REMARK = """Remark on the paper's figures: in its Table 1 every scheme's ratio between the CNN's row and the
ResNet-10's is 5,820,260 : 4,910,922, so the CNN's row was computed with ten times the 582,026 parameters that it
states. Ours is given at both sizes. The paper does not say whether its MB include what one server passes to the other,
nor whether they are 1e6 bytes or MiB, so all readings stand in the table. Its seconds are those of another machine.
"""


class Clock:
    """Wall and processor seconds per stage."""

    def __init__(self) -> None:
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the block's time."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall[name] += time.perf_counter() - wall
        self.cpu[name] += time.process_time() - cpu


class Phase:
    """One round's privacy phase.

    Args:
        d: Length of the gradients.
        buffers: What travels beside them without noise.
        noise: "secure" or "simulated".
        users: Number of users.
        timed: Users whose work is done and timed; the others' messages are copies of theirs.
    """

    def __init__(self, d: int, buffers: dict[str, torch.Tensor], noise: str, users: int, timed: int) -> None:
        self.d, self.noise, self.buffers = d, noise, buffers
        self.users, self.timed = range(users), range(timed)
        self.clock, self.bytes = Clock(), Counter[str]()
        self.client, self.router = PrivateAdaptiveClient(), Router()
        self.ms, self.aggregator = ManagementServer("dtw", 1), AggregationServer(100)
        self.k = count_of(TOP_K, d)
        self.ranking = torch.randperm(d, generator=torch_generator(0, "ranking"))[: self.k]
        self.contexts = {user: self._context(user) for user in self.timed}

    def run(self) -> None:
        """Every step in the order of a round."""
        self._ask("measure", {"ranking": self.ranking})
        with self.clock.stage("servers: bound"):
            bound = self.ms.bound()
        self._ask("protect", {"private": True, "bound": bound, "epsilon": EPSILON, "noise": self.noise})
        self._return(self._servers(bound)[0].clone())

    def _ask(self, action: str, message: Message) -> None:
        """One action of every user, and the replies' way to the servers."""
        replies: dict[int, Message] = {}
        for user in self.users:
            self.bytes["servers → users"] += message_bytes(message)
            if user in self.timed:
                with self.clock.stage(f"user: {action}"):
                    reply = getattr(self.client, action)(message, self.contexts[user])
                replies[user] = reply
            else:
                reply = copied(replies[user % len(self.timed)])
            self.bytes["users → servers"] += message_bytes(reply)
            for receiver, take in (("ms", self.ms.receive), ("as", self.aggregator.receive)):
                part = self.router.part(receiver, f"client {user}", reply)
                if part:
                    take(user, part)

    def _servers(self, bound: float) -> torch.Tensor:
        """Shuffle, ledger and what the aggregation server puts together."""
        groups = {user: user // GROUP for user in self.users}
        source = random_source(self.noise, 0, 1, "ms", "shuffle")
        with self.clock.stage("servers: shuffle"):
            mixed, _ = self.ms.shuffled(groups, source)
        with self.clock.stage("servers: ledger"):
            members = [[user for user in self.users if groups[user] == group] for group in set(groups.values())]
            ledger = Ledger(DELTA)
            ledger.record(members, self.d - self.k, EPSILON, bound)
            ledger.metrics()
        message: Message = {"clients": torch.tensor(list(groups)), "groups": torch.tensor(list(groups.values()))}
        message |= {f"less/{user}": values for user, values in mixed.items()}
        self.bytes["MS → AS"] += message_bytes(self.router.deliver("as", "ms", message))
        with self.clock.stage("servers: put together"):
            self.aggregator.receive_shuffled(message)
            return self.aggregator.vectors()

    def _return(self, aggregate: torch.Tensor) -> None:
        """The aggregate's way back; any vector of that size weighs and costs the same."""
        for user in self.users:
            self.bytes["servers → users"] += message_bytes({"aggregate": aggregate, **self.buffers})
            if user in self.timed:
                with self.clock.stage("user: put back"):
                    join_important(aggregate[: self.k], aggregate[self.k :], self.ranking, self.d)

    def _context(self, user: int) -> ClientContext:
        one = Table(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), np.zeros(1, dtype=np.int64))
        vault: Message = {"gradient": torch.randn(self.d, generator=torch_generator(0, user, "gradient"))}
        vault |= with_prefix("buffers", self.buffers)
        fabric = make_fabric(torch.device("cpu"), "32-true")
        data = ClientData(one, one, one)
        return ClientContext(f"client {user}", 1, 0, fabric, id=user, data=data, vault=vault)


def measure(
    what: str, d: int, buffers: dict[str, torch.Tensor], noise: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One line of the report."""
    timed = min(options.timed_users or options.users, options.users)
    phase = Phase(d, buffers, noise, options.users, timed)
    phase.run()
    scale = options.users / timed
    stages = {
        name: {
            "seconds": seconds * (scale if name.startswith("user") else 1),
            "cpu": phase.clock.cpu[name] * (scale if name.startswith("user") else 1),
        }
        for name, seconds in phase.clock.wall.items()
    }
    paper = PAPER.get(what, PAPER["cnn"])
    sums = {
        side: {kind: sum(stages[name][kind] for name in stages if name.startswith(side)) for kind in ("seconds", "cpu")}
        for side in ("user", "servers")
    }
    return {
        "model": what, "d": d, "noise": noise, "users": options.users, "timed_users": timed, "k": phase.k,
        "MB": {name: count / 1e6 for name, count in phase.bytes.items()},
        "not counted: MB of permutation sequences": options.users * value_bytes(phase.ranking) / 1e6,
        "stages": stages, "user side": sums["user"], "server side": sums["servers"],
        "paper": {"MB": paper[0], "seconds": paper[1]},
    }  # fmt: skip


def sizes() -> list[tuple[str, int, dict[str, torch.Tensor]]]:
    """Name, number of parameters and buffers of the paper's two networks, and the CNN's size times ten."""
    found = []
    for name, shape in SHAPES.items():
        client = PrivateAdaptiveClient(name)
        client.build(shape, 10)
        client.initialize(0)
        found.append((name, parameter_count(client), client.buffer_tensors()))
    return [*found, ("cnn × 10", TEN_TIMES_CNN, {})]


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown tables."""
    lines = ["# PA-CFL's privacy phase", "", __doc__.split("\n\n", 2)[2].strip(), "", REMARK]
    lines += [f"Settings: {report['settings']}", "", f"Machine: {report['machine']}", ""]
    columns = (
        "size", "d", "MB users → servers", "MB servers → users", "MB of users, both ways", "MB MS → AS", "MB in all",
        "MiB of users, both ways", "paper's MB", "not counted: MB of sequences",
    )  # fmt: skip
    lines += [common.row(columns), common.row(["---"] * len(columns))]
    for entry in report["lines"]:
        if entry["noise"] == report["lines"][0]["noise"]:
            lines.append(common.row(_traffic(entry)))
    columns = (
        "size", "d", "noise", "s user side, all users", "s per user", "s server side", "s in all", "CPU s in all",
        "paper's s", *report["lines"][0]["stages"],
    )  # fmt: skip
    lines += ["", common.row(columns), common.row(["---"] * len(columns))]
    return "\n".join([*lines, *(common.row(_seconds(entry)) for entry in report["lines"]), ""])


def _traffic(entry: dict[str, Any]) -> list[str]:
    up, down, across = (entry["MB"][name] for name in ("users → servers", "servers → users", "MS → AS"))
    figures = [up, down, up + down, across, up + down + across, (up + down) * 1e6 / 2**20, entry["paper"]["MB"]]
    figures.append(entry["not counted: MB of permutation sequences"])
    return [entry["model"], f"{entry['d']:,}", *(f"{figure:.2f}" for figure in figures)]


def _seconds(entry: dict[str, Any]) -> list[str]:
    user, servers = entry["user side"], entry["server side"]
    figures = [user["seconds"], user["seconds"] / entry["users"], servers["seconds"]]
    figures += [user["seconds"] + servers["seconds"], user["cpu"] + servers["cpu"], entry["paper"]["seconds"]]
    figures += [stage["seconds"] for stage in entry["stages"].values()]
    return [entry["model"], f"{entry['d']:,}", entry["noise"], *(f"{figure:.3f}" for figure in figures)]


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--timed-users", type=int, default=0, help="users whose work is timed; 0 for all")
    parser.add_argument("--noise", type=common.words, default=["secure", "simulated"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes."""
    options = parse()
    common.quiet()
    torch.set_num_threads(options.threads)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    settings |= {"top_k": TOP_K, "epsilon": EPSILON, "users in a group": GROUP}
    machine: dict[str, Any] = {"cores": os.cpu_count(), "load at the start": os.getloadavg()[0]}
    machine |= common.versions(("torch", "numpy", "numba"))
    for noise in options.noise:
        Phase(WARM_UP, {}, noise, options.users, 1).run()
    lines = [measure(*size, noise, options) for size in sizes() for noise in options.noise]
    machine["load at the end"] = os.getloadavg()[0]
    report = {"settings": settings, "machine": machine, "remark": REMARK, "lines": lines}
    common.write_json(options.out / "privacy_phase_pa_cfl.json", report)
    text = markdown(report)
    (options.out / "privacy_phase_pa_cfl.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
