# SPDX-License-Identifier: Apache-2.0
"""Types of command-line arguments. Knows nothing of any command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def positive(kind: type[Number]) -> Callable[[str], Number]:
    """A number above 0, whole if `kind` is int."""

    def checked(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < float("inf"):
            what = "whole number of at least 1" if kind is int else "number above 0"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
        return value

    return checked
