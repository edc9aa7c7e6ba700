# SPDX-License-Identifier: Apache-2.0
"""Whether a noisy series grows, and how sure that is. Knows nothing of what the series measures.

The slope is Theil and Sen's, the median over all pairs, which a few odd samples do not move. Its interval comes from
resampling whole blocks of what the line leaves over: memory grows in steps, so that neighbours are alike, and an
interval that took them for independent would be far too narrow. A robust slope also ignores one late step. So a
series is flat only if what it gained from its first fifth to its last says so too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

FLAT, GROWS, CANNOT_TELL = "flat", "grows", "cannot tell"
# Medians of neighbours stand for them where there are more: all pairs of 60 are 1,770.
MOST_POINTS = 60
FEWEST_POINTS = 16
# Of the series in one block; and how often it is resampled.
BLOCK_SHARE, RESAMPLES = 8, 400
# Per cent of the resampled slopes on either side of the interval.
TAIL = 2.5


@dataclass(frozen=True)
class Trend:
    """In units of y for one of x: the slope, its 95 % interval, and the gain from the first fifth to the last."""

    slope: float
    low: float
    high: float
    net: float

    def verdict(self, limit: float) -> str:
        """FLAT below the limit for certain, GROWS above it for certain, or CANNOT_TELL."""
        if self.low > limit:
            return GROWS
        return FLAT if max(self.high, self.net) <= limit else CANNOT_TELL


def trend(x: Values, y: Values) -> Trend | None:
    """x ascending. None if there are too few points to say anything."""
    if len(x) < FEWEST_POINTS:
        return None
    parts = np.array_split(np.arange(len(x)), min(len(x), MOST_POINTS))
    x, y = (np.array([np.median(values[part]) for part in parts]) for values in (x, y))
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] > x[first]
    first, second = first[apart], second[apart]
    spans = x[second] - x[first]

    def slope_of(values: Values) -> float:
        return float(np.median((values[second] - values[first]) / spans))

    slope = slope_of(y)
    left = y - slope * x
    block, rng = -(-len(x) // BLOCK_SHARE), np.random.default_rng(0)
    starts = rng.integers(0, len(x) - block + 1, size=(RESAMPLES, -(-len(x) // block)))
    places = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, : len(x)]
    low, high = np.percentile([slope + slope_of(left[place]) for place in places], [TAIL, 100 - TAIL])
    fifth = len(x) // 5
    net = (np.median(y[-fifth:]) - np.median(y[:fifth])) / (np.median(x[-fifth:]) - np.median(x[:fifth]))
    return Trend(slope, min(float(low), slope), max(float(high), slope), float(net))
