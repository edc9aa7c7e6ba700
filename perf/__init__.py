# SPDX-License-Identifier: Apache-2.0
"""Measurements: what the pipeline does under load and what that costs. Knows nothing of export/."""
