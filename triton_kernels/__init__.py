"""The ops as Triton kernels, installed as ``fusedaccum.triton_kernels`` (the bare name belongs to another project)."""
