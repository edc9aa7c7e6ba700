# SPDX-License-Identifier: Apache-2.0
"""Does the server hold? Hours of traffic, right answers to many at once, requests that nobody should send, processes that die."""
