# SPDX-License-Identifier: Apache-2.0
"""`python -m export`: the command behind `make export`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ensemble.errors import PipelineError

# Of the built-in sample, for the parity gate: every length there is, and a minute's work on two cores.
GATE_TEXTS = 100

console = Console(stderr=True, highlight=False, soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    result = argparse.ArgumentParser(
        prog="python -m export",
        description="Export a Hugging Face BERT classifier into a model repository that Triton serves.",
    )
    result.add_argument("model", help="local folder or hub id of a BertForSequenceClassification")
    result.add_argument(
        "--revision", default="main", help="commit, tag or branch of a hub model (default: %(default)s)"
    )
    result.add_argument(
        "--repository", type=Path, default=Path("model_repository"), help="where to install (default: %(default)s)"
    )
    result.add_argument(
        "--max-length",
        type=int,
        help="cut texts to this many tokens, [CLS] and [SEP] included (default: what the model takes)",
    )
    result.add_argument(
        "--texts",
        type=Path,
        help="UTF-8 file, one text per line, for the parity gate; texts of your own domain and language are the best "
        "proof (default: the built-in English sample)",
    )
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 installed, 1 not, and then nothing was changed."""
    args = parser().parse_args(argv)
    started = time.monotonic()
    try:
        texts = _texts(args.texts)
        # Imported here, so that --help and a wrong file answer at once.
        from export.pipeline import export

        manifest = export(
            args.model,
            args.repository,
            texts=texts,
            revision=args.revision,
            max_length=args.max_length,
            report=lambda step: console.print(f"[dim]{time.monotonic() - started:6.1f} s[/dim]  {escape(step)}"),
        )
    except PipelineError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: nothing was installed")
        return 130
    console.print(
        f"{escape(str(args.repository))} is ready to serve {escape(manifest.source['name'])}: "
        f"{len(manifest.labels)} labels, up to {manifest.max_length} tokens. Next: make serve (anew, if it runs)"
    )
    return 0


def _texts(file: Path | None) -> list[str]:
    if file is None:
        from ensemble.samples import load_samples

        return [sample.text for sample in load_samples()[:GATE_TEXTS]]
    try:
        texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"--texts {file} cannot be read ({error}): give a UTF-8 file, one text per line") from error
    if not texts:
        raise PipelineError(f"--texts {file} is empty: give one text per line")
    return texts


if __name__ == "__main__":
    sys.exit(main())
