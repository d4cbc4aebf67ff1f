"""`fedclust configs`: lists the configurations that come with the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fedclust.launch.configs import first_comment, shipped_configs


def show_configs(arguments: Sequence[str]) -> int:
    """Prints name and purpose of every shipped configuration."""
    parser = argparse.ArgumentParser(
        prog="fedclust configs", description="Lists the configurations that come with the package."
    )
    try:
        parser.parse_args(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    shipped = shipped_configs()
    width = max(map(len, shipped), default=0)
    for stem, path in shipped.items():
        sys.stdout.write(f"{stem:<{width}}  {first_comment(path)}\n")
    return 0
