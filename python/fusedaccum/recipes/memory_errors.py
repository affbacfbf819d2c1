"""Which exceptions mean that there is too little memory, and how to make room after one."""

from __future__ import annotations

import gc

import torch

# Messages of what PyTorch raises as a plain RuntimeError. The third and the last are from
# Accelerate's should_reduce_batch_size (huggingface/accelerate, src/accelerate/utils/memory.py);
# the others are what the libraries below PyTorch call it.
MESSAGES = (
    "out of memory",  # CUDA's, HIP's and MPS's own
    "OUT_OF_DEVICE_MEMORY",  # SYCL's
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cublasCreate(), for its workspace
    "CUDNN_STATUS_ALLOC_FAILED",
    "DEVICE_ALLOCATION_FAILED",  # cuDNN 9
    "CUDNN_STATUS_NOT_SUPPORTED",  # no algorithm fits into what is left
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error means that less data would have fitted."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def make_room() -> None:
    """Free unused memory. Call it when the exception is gone, whose traceback keeps tensors."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
