# SPDX-License-Identifier: Apache-2.0
"""Where the commands of export tell what they do: standard error, so that standard output is free for results."""

from rich.console import Console

console = Console(stderr=True, highlight=False, soft_wrap=True)
