# SPDX-License-Identifier: Apache-2.0
"""The client: texts in, classifications out, over gRPC. Needs numpy and tritonclient[grpc] only."""
