# SPDX-License-Identifier: Apache-2.0
"""Does the server hold? Hours of traffic, right answers to many at once, hostile requests, processes that die."""
