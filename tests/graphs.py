"""CUDA graphs, and a stand-in for them on the CPU.

It records ops and replays them on the same memory without any Python of ours.

Also: which functions torch.compile has traced.
"""

from pathlib import Path

import fusedaccum
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    """Runs and records ops. What they read and wrote stays at its address, as in a graph."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("waits for the device, which a graph cannot")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.calls:
            for there, fresh in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(there, torch.Tensor) and there.data_ptr() != fresh.data_ptr():
                    there.copy_(fresh)

    def ours(self):
        """For every call of our ops: its name, addresses written to, and non-tensor arguments."""
        return [
            (
                func.name(),
                [x.data_ptr() for x in args[0]],
                [x for x in tree_leaves(args) if not isinstance(x, torch.Tensor)],
            )
            for func, args, _, _ in self.calls
            if func.namespace == "fusedaccum"
        ]


def recorded(micro_step, pool):
    """A recording of ``micro_step`` with a ``replay()``; recording has run it once."""
    if pool is None:
        with Recording() as recording:
            micro_step()
        return recording
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        micro_step()
    graph.replay()  # capturing runs nothing
    return graph


def compile_anew():
    """Forget what was compiled before."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()


def compiled_functions():
    """Functions that the compiler has traced since compile_anew(), in order; and the package's."""
    found = [each for each in torch._dynamo.utils.get_compilation_metrics() if each.co_filename is not None]
    ours = [each.co_name for each in found if Path(fusedaccum.__file__).parent in Path(each.co_filename).parents]
    return [each.co_name for each in found], ours
