# SPDX-License-Identifier: Apache-2.0
"""Does the server hold?

Hours of traffic, right answers to many at once, more than it can take, hostile requests, processes that die.
"""
