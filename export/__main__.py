# SPDX-License-Identifier: Apache-2.0
"""`python -m export`: one command a module; here is only what they share."""

from __future__ import annotations

import argparse
import sys

from rich.markup import escape

from ensemble.errors import PipelineError
from ensemble.launcher import engine_preflight
from export import compile_check, convert, engine_check
from export.terminal import console

COMMANDS = {
    "convert": (convert, "export a Hugging Face model into a model repository"),
    "compile-check": (compile_check, "compile the installed FP16 graph for a GPU, without one"),
    "engine-check": (engine_check, "export with an engine and keep what was measured of it"),
    "preflight": (engine_preflight, "check that the installed engine fits a server and its GPU"),
}


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    result = argparse.ArgumentParser(prog="python -m export", description="Make a model repository serve a model.")
    commands = result.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return result


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 not, and then no repository was changed."""
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except PipelineError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
