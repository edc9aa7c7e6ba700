# SPDX-License-Identifier: Apache-2.0
"""`python -m export.default_model`: only parses arguments; each command lives in a module of its own."""

from __future__ import annotations

import argparse
import sys

from ensemble.errors import PipelineError
from export.default_model import build, samples, train

COMMANDS = {
    "build": (build.add_arguments, build.run, "write the default model as a Hugging Face folder"),
    "train": (train.add_arguments, train.run_command, "train the default model's adapter and measure it"),
    "samples": (samples.add_arguments, samples.run, "write the sample texts, one JSON object a line"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns 0, or 1 with a line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m export.default_model", description="The offline default model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add_arguments, run, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        add_arguments(command)
        command.set_defaults(run=run)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
