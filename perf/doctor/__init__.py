# SPDX-License-Identifier: Apache-2.0
"""The doctor: looks at any Triton model on any server and names what keeps it slow. command.py is the way in."""
