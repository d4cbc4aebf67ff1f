"""What secure sums cost: seconds and bytes by length, number of clients and dropouts, beside plain sums and CKKS.

    python benchmarks/secure_sum.py                                     # 1e5 and 1e6 values, 10, 50 and 100 clients
    python benchmarks/secure_sum.py --lengths 1000,10000 --clients 4,10 --ckks-length 5000 --out /tmp/try

Every client runs on this machine, one after the other, on one thread; `client s` is the mean of one client's own
seconds over all steps, `server s` those of the server. Clients that drop out do so after the masks are exchanged.
Values are standard normal, cut at 8; the error is against the float64 sum of the survivors. Writes secure_sum.json and
secure_sum.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

from fedclust.privacy.sums import sum_vectors
from fedclust.random import numpy_generator

BOUND = 8.0
HEADERS = ["mode", "values", "clients", "dropped", "client s", "server s", "client MB up", "client kB down", "error"]


def measure(mode: str, length: int, n: int, share: float, **options: Any) -> dict[str, Any]:
    """One sum: seconds, bytes and error."""
    generator = numpy_generator(0, "secure sum", length, n)
    vectors = {client: generator.standard_normal(length).clip(-BOUND, BOUND) for client in range(n)}
    dropped = range(n - round(share * n), n)
    start = time.perf_counter()
    result = sum_vectors(vectors, mode, bound=BOUND, dropped=dropped, **options)
    seconds = time.perf_counter() - start
    exact = np.sum([vectors[client] for client in result.survivors], axis=0)
    stayed = result.survivors[1:]
    row = {
        "mode": mode + "".join(f" {name}={value}" for name, value in options.items()),
        "length": length,
        "clients": n,
        "dropped": len(dropped),
        "survivors": result.count,
        "seconds": seconds,
        # Client 0 is the key-holder of CKKS, so it is not like the others.
        "client_seconds": float(np.mean([result.client_seconds[client] for client in stayed])),
        "server_seconds": result.server_seconds,
        "client_bytes_up": int(np.mean([result.bytes_up[client] for client in stayed])),
        "client_bytes_down": int(np.mean([result.bytes_down[client] for client in stayed])),
        "all_bytes_up": sum(result.bytes_up.values()),
        "all_bytes_down": sum(result.bytes_down.values()),
        "max_abs_error": float(np.abs(result.total - exact).max()),
        "stated_error": result.max_error,
    }
    print(json.dumps(row), flush=True)
    return row


def all_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every combination that was asked for."""
    rows = []
    for length in options.lengths:
        for n in options.clients:
            rows.append(measure("plain", length, n, 0.0))
            for share in options.dropouts:
                rows.append(measure("secure_sum", length, n, share))
            rows.append(measure("secure_sum", length, n, 0.0, bits=32))
    if options.ckks_length and common.installed("tenseal"):
        rows += [measure("ckks", options.ckks_length, n, share) for n in options.clients for share in options.dropouts]
    return rows


def machine() -> dict[str, Any]:
    """What the figures were measured with."""
    packages = {name: common.installed(name) for name in ("fedclust", "numpy", "cryptography", "tenseal")}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load_1min": load, **packages}


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    where = record["machine"]
    lines = [
        "# Secure sums",
        "",
        f"{where['cpu']}, {where['cores']} cores, load at the start {where['load_1min']}; numpy {where['numpy']}, "
        f"cryptography {where['cryptography']}, TenSEAL {where['tenseal'] or 'not installed'}. One thread. Written by "
        "`python benchmarks/secure_sum.py`.",
        "",
        *common.heading(HEADERS),
    ]
    for row in record["rows"]:
        cells = [
            row["mode"],
            f"{row['length']:,}",
            str(row["clients"]),
            str(row["dropped"]),
            f"{row['client_seconds']:.3f}",
            f"{row['server_seconds']:.3f}",
            f"{row['client_bytes_up'] / 1e6:.2f}",
            f"{row['client_bytes_down'] / 1e3:.1f}",
            f"{row['max_abs_error']:.1e}",
        ]
        lines.append(common.row(cells))
    return "\n".join(lines) + "\n"


def numbers(text: str) -> list[int]:
    """``"1000,10000"`` as numbers."""
    return [int(float(part)) for part in text.split(",")]


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=numbers, default=[100_000, 1_000_000])
    parser.add_argument("--clients", type=numbers, default=[10, 50, 100])
    parser.add_argument("--dropouts", type=common.decimals, default=[0.0, 0.1])
    parser.add_argument("--ckks-length", type=lambda text: int(float(text)), default=100_000, help="0 leaves CKKS out")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    record = {"machine": machine(), "bound": BOUND}
    record["rows"] = all_rows(options)
    common.write_json(options.out / "secure_sum.json", record)
    (options.out / "secure_sum.md").write_text(table(record), encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    main()
