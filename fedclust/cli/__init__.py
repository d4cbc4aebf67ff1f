"""The `fedclust` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedclust.launch import PURPOSES

COMMANDS = {
    **PURPOSES,
    "tune": "search a space of configurations with Optuna",
    "configs": "list the configurations that come with the package",
}
_USAGE = """usage: fedclust COMMAND [options]

Federated clustering. Commands:
{commands}

fedclust COMMAND --help shows a command's options, fedclust --version the version.
First steps: fedclust fit --config feddcn_digits
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `fedclust` command.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        Exit code: 0 done, 1 the run failed, 2 it could not start (usage, configuration, data), 130 interrupted.
    """
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # while modules are imported; runs handle it themselves
        return 130


def _dispatch(arguments: list[str]) -> int:
    usage = _USAGE.format(commands="\n".join(f"  {name:<9} {text}" for name, text in COMMANDS.items()))
    if not arguments:
        sys.stderr.write(usage)
        return 2
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help"):
        sys.stdout.write(usage)
        return 0
    if command == "--version":
        import fedclust

        sys.stdout.write(f"fedclust {fedclust.__version__}\n")
        return 0
    if command not in COMMANDS:
        sys.stderr.write(f"fedclust: error: {command!r} is no command; commands are {', '.join(COMMANDS)}\n")
        return 2
    if command == "configs":
        from fedclust.cli.configs import show_configs

        return show_configs(rest)
    if command == "tune":
        from fedclust.cli.tune import run_tune

        return run_tune(rest)
    from fedclust.cli.commands import run_command

    return run_command(command, rest)
