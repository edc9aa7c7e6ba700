# SPDX-License-Identifier: Apache-2.0
"""make perf: the looping handler, the stacked tensors and the ensemble under one load, and the report of it."""
