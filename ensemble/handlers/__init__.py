# SPDX-License-Identifier: Apache-2.0
"""What runs inside the models of Triton's Python backend, and in-process where a measurement needs it."""
