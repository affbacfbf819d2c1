"""A pytest plugin: the extension in folder CUDA_SHIM is the backend ``cuda``, for CPU tensors."""

import os
import sys

from fusedaccum.ops import backends

sys.path.append(os.environ["CUDA_SHIM"])
backends.TABLE = (
    backends.Backend("cuda", "cuda_shim", ("cpu",), lambda: None),
    *(row for row in backends.TABLE if row.name != "cuda"),
)
