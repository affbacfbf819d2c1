"""The ops in Triton, installed as ``fusedaccum.triton_kernels``: the bare name is taken."""
