"""The wrapper: ``opt = AccumulatingOptimizer(opt, accum_steps=8)``; the loop stays as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .. import features
from ..autograd.passes import saw_pass
from ..distributed.checkpoint import refuse_torchs_functions
from ..engine import outside_graphs, without_grad
from ..mistakes import check_arguments, check_is_optimizer, suggests_arguments
from ..scalars import Scalar, checked_loss, checked_weight
from ..times_mean import TimesMean
from .config import Settings, check_optimizer
from .extension import LossFrom
from .proxy import Wrapper

BACKWARD = ("weight", "last", "gradient", "retain_graph", "create_graph", "inputs")  # Tensor.backward's, and ours


class AccumulatingOptimizer(Wrapper):
    """Any torch optimizer, stepped once per window of micro-batches with its whole gradient.

    The window's gradient is ``sum(w_i * g_i) / sum(w_i)`` for ``reduction="mean"`` (w_i = 1 unless
    given), ``sum(g_i) / sum(w_i)`` for ``"sum"``, ``sum(g_i)`` for ``"none"``. Gradients accumulate
    in buffers of ``buffer_dtype``, by one fused call per bucket, during backward. ``p.grad`` is the
    buffer; within a window it holds the running sum (in 16-bit buffers the running mean, which
    cannot overflow where the window's gradient fits, unless ``"none"`` or compensated).

    Args:
        optimizer: any ``torch.optim.Optimizer``; kept as ``.optimizer``, with its own state.
        accum_steps: micro-batches per window, an int or a pure callable(window_index) -> int.
        window_weight: instead of ``accum_steps``: a window closes once its weights add up to this
            (samples, tokens). With neither, the caller owns the boundary: every ``step()`` closes
            the window, every backward pass is a micro-batch.
        reduction: what a micro-batch's loss is: a ``"mean"`` over its items, a ``"sum"`` over them
            (which the weights divide), or, with ``"none"``, normalised by the caller, or a sum that
            stays a sum.
        buffer_dtype: dtype of the buffers, or None for the parameter's own; never narrower than the
            gradient (``p.grad_dtype``).
        rounding: ``"nearest"``, or for 16-bit buffers ``"stochastic"`` (seeded from PyTorch's
            default generator, of one of the ranks), or for bf16 ``"compensated"``: one more byte
            keeps what rounding would drop, so that sums have 24 bits.
        master_weights: keep FP32 copies of 16-bit parameters and step those; ``"split"``: in 2
            bytes beside a bf16 parameter, which is their upper half, in place of 4.
        max_grad_norm: clip the window's gradient to this 2-norm (``math.inf`` only measures it).
        nonfinite: ``"propagate"``; ``"skip_window"`` does not apply a window that holds a NaN or an
            infinity; ``"skip_micro_batch"`` leaves the bad micro-batch out without a trace, and
            therefore holds its gradients until its backward is over; ``"raise"`` does so too, and
            raises FloatingPointError at ``step()``.
        backend: ``"cuda"``, ``"triton"``, ``"cpu"``, ``"reference"``, or ``"auto"``: the variable
            FUSEDACCUM_BACKEND if set, else the first that is ready on the tensors' device.
        buffer_device: ``"cpu"`` keeps the buffers in CPU memory, and with ``master_weights=True``
            also the weights that are stepped and the optimizer's state; gradients leave the device
            during backward. ``p.grad`` stays None except during the inner step.
        optimizer_device: ``"cpu"`` keeps FP32 weights and the optimizer's state in CPU memory, and
            steps there; buffers stay on the device.
        process_group: ranks that share windows: gradients and weights are summed over all of them
            (under ``"none"``, the gradient is their mean), by one all-reduce per window for each
            bucket of the buffers. None: the group of the DistributedDataParallel or FSDP2 modules
            that hold the parameters, if any; DDP's own reduction is switched off. All ranks must
            close the same number of windows; micro-batches and weights may differ.
        comm_dtype: dtype in which sums travel between ranks, BF16 or FP32, to be added in FP32 at
            least; None for the buffers' dtype.
        shard: each rank steps only a part of the parameters, and keeps the optimizer's state and
            the master weights of these (ZeRO-1). Sums are reduced to the rank that steps them,
            which distributes the stepped parameters. ``state_dict()`` is a rank's own.
        noise_scale: measure the gradient noise scale ``tr(Sigma) / |G|^2``, as
            ``last_window.noise_scale``. The number is the decay of its running averages per window,
            at least 0 and less than 1 (such as 0.95). McCandlish et al., 2018, appendix A.1.
        skip_norm: do not apply a window whose gradient's 2-norm, before ``max_grad_norm``, is above
            this number, or not finite; ``fusedaccum.TimesMean(3.0)``: above three times the running
            mean of the norms of earlier windows.

    Raises:
        TypeError, ValueError: an invalid argument, optimizer or parameter; the message names it and
            the fix. RuntimeError: a backend that is not available.

    Waits for the device only where a decision needs it. Once per window: ``nonfinite`` and
    ``skip_norm`` (unless a fused optimizer skips on the device), weights that are device tensors,
    ``optimizer_device``, other ranks. Once per micro-batch: a ``nonfinite`` that drops one, such
    weights with ``window_weight``, a GradScaler.
    """

    @suggests_arguments("AccumulatingOptimizer")
    def __init__(
        self,
        optimizer: Optimizer,
        accum_steps: int | Callable[[int], int] | None = None,
        window_weight: float | None = None,
        reduction: str = "mean",
        buffer_dtype: torch.dtype | None = torch.float32,
        rounding: str = "nearest",
        master_weights: bool | str = False,
        max_grad_norm: float | None = None,
        nonfinite: str = "propagate",
        backend: str = "auto",
        buffer_device: str | torch.device | None = None,
        optimizer_device: str | torch.device | None = None,
        process_group: dist.ProcessGroup | None = None,
        comm_dtype: torch.dtype | None = None,
        shard: bool = False,
        noise_scale: float | None = None,
        skip_norm: float | TimesMean | None = None,
    ):
        arguments = {name: value for name, value in locals().items() if name not in ("self", "optimizer")}
        check_is_optimizer(optimizer)
        settings = Settings.checked(**arguments)
        check_optimizer(optimizer, settings, AccumulatingOptimizer)
        features.check(settings, optimizer)
        self._build(optimizer, settings)
        for newly_wrapped in self._accumulation.extensions.newly_wrapped:
            newly_wrapped()

    @outside_graphs
    def backward(self, loss: Tensor, *, weight: Scalar | None = None, last: bool = False, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)`` for a micro-batch of this weight.

        Several calls before one ``step()`` are parts of one micro-batch; in windows that the caller
        owns, each is one. Records the loss, if it is a single number, for ``last_window.loss``.

        Args:
            weight: number or 0-d tensor (samples, tokens), finite, >= 0; 1 when left out; with 0,
                nothing is added. Under ``reduction="mean"`` it also applies to other wrappers that
                accumulate gradients of this loss.
            last: a hint that the window ends here, so that its sums may travel (to other ranks, or
                a CPU) while this backward computes. Needless with ``accum_steps``. Closes nothing;
                has no effect with ``window_weight``.

        Raises:
            ValueError: an invalid weight, or not the one given before for this micro-batch.
            RuntimeError: a weight of a loss that reaches FSDP2's parameters, given to a wrapper
                that does not have them.
        """
        if kwargs:
            check_arguments("opt.backward", kwargs, BACKWARD)
        block = self._grouped(weight, last, weight is not None and self._accumulation.weighs_loss)
        try:
            with block:
                for begins in self._accumulation.extensions.backward_begins:
                    begins(loss)
                weighed = loss * self._ledger.micro.value() if self._ledger.micro.in_loss else loss
                weighed.backward(**kwargs)  # its hooks (autograd/) bring the gradients to core/backward.py
                saw_pass(threading.get_ident())
                if kwargs.get("gradient") is None:  # else the gradients are not of the loss itself
                    self._accumulation.record_loss(loss, LossFrom.PASS)
        finally:
            self._accumulation.passes.inside = False  # if Ctrl-C has come in place of the block's end

    @outside_graphs
    def record_loss(self, loss: Scalar) -> None:
        """Record a micro-batch's loss for ``last_window``, if other code has called its backward.

        Call it after that backward, before ``step()``. ``loss`` is a number or a tensor of one
        element, without a GradScaler's factor; those of several passes of one micro-batch add up.
        Losses that :meth:`backward` is given, or a closure returns (not LBFGS's), are recorded
        already. Does not wait for the device.

        Raises:
            TypeError, ValueError: not a number, or several. RuntimeError: no loss is missing.
        """
        self._accumulation.record_loss(checked_loss(loss), LossFrom.CALLER)

    @suggests_arguments("opt.micro_batch")
    @contextmanager
    def micro_batch(self, *, weight: Scalar | None = None, last: bool = False) -> Iterator[None]:
        """Make all passes in the block one micro-batch of this weight; raises as :meth:`backward`.

        When an exception leaves the block, the micro-batch counts for nothing; if part of it had
        already been added, the open window is dropped, with a warning. It also counts for nothing
        if no backward in the block reached a wrapped parameter (``continue``, for a loss that is
        NaN), unless ``step()`` follows: then it is a micro-batch without gradients.
        """
        if self._accumulation.weighs_loss and weight is not None:
            raise ValueError(
                f"weight={weight!r}: FSDP2 adds up the ranks' gradients before they can be weighed; use "
                "opt.backward(loss, weight=...), which puts the weight into the loss, or losses that are sums and "
                "reduction='sum'"
            )
        with self._grouped(weight, last, False):
            yield

    @outside_graphs
    def _grouped(self, weight: Scalar | None, last: bool, in_loss: bool) -> AbstractContextManager[None]:
        self._not_inside("opt.backward(), or a second micro_batch(),", "call loss.backward() there")
        self._accumulation.passes.end_open_pass()
        return self._accumulation.passes.grouped(None if weight is None else checked_weight(weight), last, in_loss)

    @outside_graphs
    @without_grad
    def step(self, closure: Callable[[], Any] | None = None, *, weight: Scalar | None = None) -> Any:
        """End the micro-batch. If that completes the window, divide, clip and step.

        Args:
            closure: evaluates the micro-batch (forward and backward) and returns its loss; called
                once, with gradients enabled. The inner optimizer gets one that returns that loss,
                or that of a whole window. (LBFGS calls it often: run the whole window in it.)
            weight: the micro-batch's, where it does not scale the gradient and may come late
                (``reduction="sum"``, ``"none"``); in windows that the caller owns, that of all that
                have none yet. Unlike in :meth:`backward`, weight 0 does not keep the gradient out.

        Returns:
            what the closure returned.

        Raises:
            ValueError: ``weight`` comes too late, or is missing under ``reduction="sum"``; nothing
                is counted then.
            FloatingPointError: ``nonfinite="raise"``; the micro-batch is dropped, nothing else.
            RuntimeError: a parameter has changed its dtype, device or shape; or a step() broke off
                while it divided the sums, and the window must be repeated after ``reset()``.
        """
        self._accumulation.updated = False  # also where this raises
        try:
            self._not_inside("step()")
            given = None if weight is None else self._ledger.late_weight(weight)
            for run_step in self._accumulation.extensions.run_step:  # one at most
                self._begin_step()
                return run_step(self._closing, closure, given)
            evaluated = self._closing.evaluate(closure)
            loss = None if evaluated is None else evaluated.result
            self._begin_step()
            if self._ledger.window is None:
                refuse_torchs_functions("step()")
            if self._closing.apply_again():
                return loss
            for steps_again in self._accumulation.extensions.steps_again:
                if steps_again(self._closing, evaluated):
                    return loss
            for begins in self._accumulation.extensions.step_begins:
                begins()
            self._accumulation.end_micro_batch(given)
            if self._accumulation.complete():
                self._closing.close(evaluated)
            else:
                for goes_on in self._accumulation.extensions.window_goes_on:
                    goes_on()
            self._accumulation.step_under_way = False
            return loss
        finally:
            for ended in self._accumulation.extensions.step_ended:
                ended()

    @outside_graphs
    @without_grad
    def flush(self) -> None:
        """Apply a partial window, divided by what it actually holds.

        A backward pass not yet followed by ``step()`` is part of it. Does nothing if nothing was
        accumulated (on any rank). Raises as :meth:`step`; TypeError if LBFGS would have to step.
        """
        if "settings" not in self.__dict__:  # an object of another class, made by Lightning, in front of the wrapper
            return self.optimizer.flush()  # type: ignore[attr-defined]
        self._accumulation.updated = False
        self._not_inside("flush()")
        self._begin_step()
        for flush_begins in self._accumulation.extensions.flush_begins:
            flush_begins()
        self._closing.apply_again()
        self._accumulation.drop_idle()
        if self._ledger.micro is not None or self._accumulation.rejected:
            self._accumulation.end_micro_batch(None)
        if self._ledger.is_open:
            self._ledger.weigh_the_rest(None)
        if self._closing.anything_to_flush():
            self._closing.close()
        self._accumulation.step_under_way = False

    @outside_graphs
    def reset(self) -> None:
        """Drop a partial window, and forwards without a backward; the next window has its index.

        The loss scale last seen from a GradScaler is forgotten, too, until the scaler steps again.
        """
        self._not_inside("reset()")
        self._accumulation.updated = False
        self._accumulation.passes.end_open_pass()
        self._accumulation.reset()
        self._forget_outside()

    @outside_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Keep what a counted or weighted window of several micro-batches holds; else as PyTorch's.

        Warns if this keeps a backward without a ``step()``, which plain PyTorch would drop.
        """
        self._accumulation.passes.end_open_pass()
        if self._ledger.keeps:
            for kept in self._accumulation.extensions.window_kept:
                kept()
            return
        self._not_inside("zero_grad()")
        zeroed = [] if set_to_none else self._sums.buffers.slots_with_grad()
        self._accumulation.reset()
        self.optimizer.zero_grad()
        if zeroed:
            # Zeros are a gradient, unlike None: the inner optimizer decays weights and moves its
            # momentum with them.
            self._accumulation.begin_window()
            self._sums.zero_(zeroed)

    @outside_graphs
    @without_grad
    def normalize_(self) -> None:
        """After a window's last backward, before ``step()``: make ``p.grad`` its gradient.

        The gradient is in the buffer's dtype, before ``max_grad_norm``, and with a GradScaler still
        multiplied by the loss scale in force (unscale it as in plain PyTorch, before or after). One
        pass; does not wait for the device, except with ``window_weight`` for weights that are on
        it. With a process group it is the gradient of all ranks: all of them must call it, and it
        waits.

        Raises:
            RuntimeError: the window is not complete, or ``p.grad`` does not show all of it
                (``buffer_device``, ``shard=True``).
            ValueError: a weight is still missing (``reduction="sum"``).
        """
        self._not_inside("normalize_()")
        self._accumulation.passes.end_open_pass()
        self._sums.check_shown("normalize_() makes p.grad the window's gradient", "clip with max_grad_norm=")
        self._closing.normalize_()
