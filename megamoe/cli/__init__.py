"""The command line: `megamoe <command>`. Each command is a module that is imported only when it is run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megamoe._version import __version__
from megamoe.errors import MegaMoEError, MegaMoETypeError, MegaMoEValueError


@dataclasses.dataclass(frozen=True)
class Command:
    """A module with `add_arguments(parser)` and a function that takes the parsed arguments and returns the status."""

    module: str
    function: str
    summary: str


COMMANDS: dict[str, Command] = {
    "verify": Command("megamoe.cli.verify", "verify_main", "compare every stage of the layer with the fp64 oracle"),
    "info": Command("megamoe.cli.info", "info_main", "versions, devices, and which backend runs here or why not"),
    "plan": Command("megamoe.cli.plan", "plan_main", "the memory a layer will hold, before anything is allocated"),
    "bench": Command("megamoe.cli.bench", "bench_main", "time the layer beside torch's grouped GEMMs; write records"),
    "tune": Command("megamoe.cli.tune", "tune_main", "measure how a layer overlaps best; write what the layer reads"),
    "soak": Command("megamoe.cli.soak", "soak_main", "random calls of one backend against another, for minutes"),
    "trace": Command("megamoe.cli.trace", "trace_main", "what every role of a fused forward or backward does when"),
}


class Parser(argparse.ArgumentParser):
    """One line for what cannot be parsed, as for what a command refuses."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}. {self.prog} --help tells its options.\n")


def build_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one command; imports its module."""
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    parser = Parser(prog=f"megamoe {name}", description=module.__doc__)
    module.add_arguments(parser)
    return parser


def usage() -> str:
    """The help text of `megamoe` itself."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megamoe <command> [options]",
            "",
            "commands:",
            *lines,
            "",
            "megamoe <command> --help tells its options.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: command and options; None: those of the process.

    Returns:
        The exit status: 0 for success, 1 where a gate failed or the layer does not run here, 2 for options that are
        refused.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"megamoe {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(
            f"command: expected one of {', '.join(COMMANDS)}, got {name!r}. megamoe --help tells more.", file=sys.stderr
        )
        return 2
    parsed = build_parser(name).parse_args(arguments[1:])
    function = getattr(importlib.import_module(COMMANDS[name].module), COMMANDS[name].function)
    try:
        status = int(function(parsed))
        sys.stdout.flush()
        return status
    except MegaMoEError as error:
        print(f"megamoe {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, MegaMoEValueError | MegaMoETypeError) else 1
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
