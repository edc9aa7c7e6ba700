# SPDX-License-Identifier: Apache-2.0
"""What a GPU could do, by arithmetic alone. Nothing here runs a model."""
