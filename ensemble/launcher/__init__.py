# SPDX-License-Identifier: Apache-2.0
"""The server as a child process: found, checked, started, watched, stopped. Knows nothing of tokens."""
