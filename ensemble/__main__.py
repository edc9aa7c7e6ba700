# SPDX-License-Identifier: Apache-2.0
"""`python -m ensemble`: serve, classify, probe, demo. Only parses arguments; each command is a module of its own."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from ensemble.errors import PipelineError

COMMANDS = {
    "serve": "run the Triton server in the foreground",
    "classify": "classify texts on a running server",
    "probe": "exit 0 if a running server answers a classification in time",
    "demo": "start a server, classify a few texts, stop it",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m ensemble", description="Serve and use the text classifier.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, help_text in COMMANDS.items():
        command = commands.add_parser(name, help=help_text)
        if name in arguments[:1]:  # the others would only be imported: a probe runs every few seconds
            module = import_module(f"ensemble.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
