# SPDX-License-Identifier: Apache-2.0
"""Where tables and progress are printed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, ProgressColumn

# Of the widest table. Rich takes 80 where it writes to a file or a log, and squeezes tables into it until nobody can
# read them.
WIDTH = 200
# Between two lines of progress in a log.
LINE_SECONDS = 30.0


def console() -> Console:
    """As wide as the terminal, or as COLUMNS says; where it is neither, wide enough."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)


@contextmanager
def progress(*columns: str | ProgressColumn) -> Iterator[Progress]:
    """Rich's bars on a terminal, gone in the end. In a log, where they do not show, a line now and then."""
    printed, over = console(), threading.Event()
    with Progress(*columns, console=printed, transient=True) as bars:

        def tell() -> None:
            while not over.wait(LINE_SECONDS):
                printed.print(bars.get_renderable())

        lines = threading.Thread(target=tell, daemon=True)
        if not printed.is_terminal:
            lines.start()
        try:
            yield bars
        finally:
            over.set()
            if lines.ident is not None:
                lines.join()
