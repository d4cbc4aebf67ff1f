"""Who runs a trial, and whether that process still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Host, number and start of this process; together they name it for good."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": start_of(os.getpid())}


def start_of(pid: int) -> str | None:
    """When a process started, as text to compare; None if it is not running or cannot be known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None if Path("/proc/self/stat").exists() else _start_by_psutil(pid)
    fields = text.rpartition(")")[2].split()
    # A zombie is over; its number is only kept for its parent.
    return None if fields[0] in ("Z", "X") else f"{fields[19]} {_boot()}"


def alive(worker: Mapping[str, Any]) -> bool | None:
    """Whether a process of this host still runs; None for one of another host."""
    if worker.get("host") != socket.gethostname():
        return None
    pid = int(worker["pid"])
    if worker.get("start") is not None:
        return start_of(pid) == worker["start"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _start_by_psutil(pid: int) -> str | None:
    try:
        import psutil
    except ImportError:
        return None
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return None
