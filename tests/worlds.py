"""Processes that are a process group's ranks, kept for all tests: starting one takes seconds."""

import contextlib
import datetime
import functools
import gc
import multiprocessing
import os
import traceback
import warnings

SLOW_TO_IMPORT = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
COUNT_FROZEN = gc.get_freeze_count


def _serve(rank, size, store, timeout, backend, pipe, together):
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fully_shard would use the GPU, on which gloo cannot reduce
    import torch
    import torch._dynamo
    import torch.distributed as dist

    # Else collecting would go through PyTorch's 300,000 objects, and so would counting the frozen
    # ones: two thirds of the tests' time.
    gc.freeze()
    gc.get_freeze_count = functools.partial(int, COUNT_FROZEN())
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # distributed checkpoints of PyTorch 2.10
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # PyTorch of its own thread
    warnings.filterwarnings("ignore", "'_UnionGenericAlias' is deprecated")  # PyTorch's compiler, in Python 3.14
    torch.set_num_threads(1)
    case, arguments = pipe.recv()  # imports the test's module, which on a busy machine can outlast a short timeout
    together.wait()
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout)
    )
    while case is not None:
        try:
            torch.manual_seed(0)
            pipe.send((True, case(rank, **arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        case, arguments = pipe.recv()
    dist.destroy_process_group()


class World:
    """``size`` ranks: ``run(case, **arguments)`` returns ``case(rank, **arguments)`` of each."""

    def __init__(self, size, folder, timeout=20, backend="gloo"):
        # Imported once for all ranks without CUDA, which does not always work in a forked process.
        context = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
        context.set_forkserver_preload(SLOW_TO_IMPORT)
        self.size, self._pipes, self.processes = size, [], []
        self._together = context.Barrier(size)  # kept: it is gone with its last reference here
        self.broken = False  # may the ranks be out of step with each other?
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, folder / "store", timeout, backend, theirs, self._together)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, case, **arguments):
        answers = self.answers(case, **arguments)
        wrong = [f"rank {rank}:\n{answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
        assert not wrong, "\n".join(wrong)
        return [answer for _, answer in answers]

    def answers(self, case, **arguments):
        """As :meth:`run`, but returns per rank whether it succeeded, and its result or error."""
        for pipe in self._pipes:
            pipe.send((case, arguments))
        answers = [self._answer(pipe) for pipe in self._pipes]
        self.broken = self.broken or not all(fine for fine, _ in answers)
        return answers

    def _answer(self, pipe):
        if not pipe.poll(120):
            return False, "no answer in two minutes"
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return False, "died"

    def close(self):
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((None, None))
        for process in self.processes:
            process.join(10)
            process.kill()
