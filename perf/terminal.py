# SPDX-License-Identifier: Apache-2.0
"""Where tables are printed."""

from __future__ import annotations

import os

from rich.console import Console

# Of the widest table. Rich takes 80 where it writes to a file or a log, and squeezes tables into it until nobody can
# read them.
WIDTH = 200


def console() -> Console:
    """As wide as the terminal, or as COLUMNS says; where it is neither, wide enough."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)
