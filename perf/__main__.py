# SPDX-License-Identifier: Apache-2.0
"""`python -m perf`: only parses arguments; each measurement lives in a module of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ensemble.errors import PipelineError
from perf import batching_wins, cost_model, gpu_check, long_tail, losing_mix, served_ratio
from perf.doctor import command as doctor
from perf.endurance import correctness, hostile, kills, overload, soak
from perf.experiment import command as experiment
from perf.experiment import report
from perf.paper import roofline

COMMANDS = {
    "experiment": experiment,
    "report": report,
    "batching-wins": batching_wins,
    "losing-mix": losing_mix,
    "long-tail": long_tail,
    "served-ratio": served_ratio,
    "cost-model": cost_model,
    "overload": overload,
    "roofline": roofline,
    "gpu-check": gpu_check,
    "correctness": correctness,
    "soak": soak,
    "hostile": hostile,
    "kills": kills,
    "doctor": doctor,
}


def main(argv: list[str] | None = None) -> int:
    """Run one measurement; returns 0, or 1 with a line that says why there is no figure (doctor: its own codes)."""
    parser = argparse.ArgumentParser(prog="python -m perf", description="Measure the installed model on this machine.")
    commands = parser.add_subparsers(required=True, metavar="MEASUREMENT")
    for name, module in COMMANDS.items():
        text = str(module.__doc__)
        command = commands.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if module is not doctor:  # which runs what is in a repository, and so only in one that is named
            command.add_argument(
                "--repository", type=Path, default=Path("model_repository"), help="default: %(default)s"
            )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
