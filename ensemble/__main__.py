# SPDX-License-Identifier: Apache-2.0
"""`python -m ensemble`: serve, classify, demo. Only parses arguments; each command lives in a module of its own."""

from __future__ import annotations

import argparse
import sys

from ensemble import classify, demo, serve
from ensemble.errors import PipelineError

COMMANDS = {
    "serve": (serve, "run the Triton server in the foreground"),
    "classify": (classify, "classify texts on a running server"),
    "demo": (demo, "start a server, classify a few texts, stop it"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ensemble", description="Serve and use the text classifier.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
