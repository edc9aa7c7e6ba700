# SPDX-License-Identifier: Apache-2.0
"""Names, as pip wants it, the `tensorrt` package of the very TensorRT that this machine's server loads engines with.

The Dockerfile asks it before anything is installed: needs the standard library only, and no GPU.
"""

from __future__ import annotations

import os
import sys

from ensemble.launcher.runtime import find_runtime


def package(tensorrt: str, cuda: str) -> str:
    """tensorrt-cu12==10.5.0.* for 10.5.0 and 12.6.2.004. Some versions have a build number behind the three."""
    return f"tensorrt-cu{cuda.split('.')[0]}=={tensorrt}.*"


if __name__ == "__main__":
    runtime, cuda = find_runtime(), os.environ.get("CUDA_VERSION")
    if runtime.tensorrt is None:
        sys.exit(f"error: the server's TensorRT version is not known ({runtime.why_unknown}): try another RELEASE")
    if not cuda:
        sys.exit("error: CUDA_VERSION is not set, as it is in NVIDIA's images: try another RELEASE")
    print(package(runtime.tensorrt, cuda))
