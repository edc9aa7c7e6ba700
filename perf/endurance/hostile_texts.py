# SPDX-License-Identifier: Apache-2.0
"""Texts that are sound and strange, with characters of every block of Unicode. Knows nothing of servers."""

from __future__ import annotations

import random
import unicodedata
from functools import cache

# Of one block, to which Unicode's own are aligned.
BLOCK = 0x80
CODE_POINTS = 0x110000
UNASSIGNED, SURROGATE = "Cn", "Cs"


@cache
def blocks() -> tuple[str, ...]:
    """The characters of each block that has any, surrogates left out, which are none."""
    found = []
    for start in range(0, CODE_POINTS, BLOCK):
        characters = map(chr, range(start, start + BLOCK))
        known = "".join(c for c in characters if unicodedata.category(c) not in (UNASSIGNED, SURROGATE))
        found += [known] if known else []
    return tuple(found)


def of_every_block(count: int, rng: random.Random) -> list[str]:
    """So many texts that have a character of every block between them."""
    shuffled = rng.sample(blocks(), len(blocks()))
    return ["".join(rng.choice(block) for block in shuffled[first::count]) for first in range(count)]


def strange(rng: random.Random) -> str:
    """One text of a few blocks, or one that is known to be awkward."""
    if rng.random() < 0.3:
        return rng.choice(AWKWARD)
    return "".join(rng.choice(rng.choice(blocks())) for _ in range(rng.randint(0, 60)))


AWKWARD = (
    "",
    " \t\r\n\u2028",
    "\x00",
    "\x00\x01\x02\x1b[31m",
    "\u200d" * 300,
    "e" + "\u0301" * 3000,
    "\ufdfa" * 200,
    "\u202e\u2066\u2067\u2069",
    "\U000e0001\U000e007f",
    "\ufffe\uffff\U0010ffff",
    "[CLS] [SEP] [PAD] [MASK] [UNK]",
    "##" * 300,
    "x" * 5000,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466" * 40,
    "1:2:3",
)
