"""Any order of calls behaves like a one-page model: lists of numbers and one division."""

import copy
import io
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn import Parameter

LR = 0.5
VALUES = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=2)
# Which parameters a backward reaches, and with what gradients.
GRADIENTS = st.fixed_dictionaries({}, optional={"p": VALUES, "q": VALUES}).filter(bool)


class CallOrders(RuleBasedStateMachine):
    """``self.real`` wraps SGD; ``self.window`` and ``self.values`` are what it should hold."""

    @initialize(
        mode=st.sampled_from(["counted", "weighed", "caller-owned"]),
        reduction=st.sampled_from(["mean", "sum", "none"]),
        steps=st.integers(1, 4),
    )
    def build(self, mode, reduction, steps):
        self.mode, self.reduction = mode, reduction
        self.limit = steps if mode == "counted" else 3.0 * steps
        self.kwargs = {"counted": {"accum_steps": steps}, "weighed": {"window_weight": self.limit}}.get(mode, {})
        self.values = {"p": [1.0, 2.0], "q": [3.0, 4.0]}
        self.params = {k: Parameter(torch.tensor(v, dtype=torch.float64)) for k, v in self.values.items()}
        self.real = self.wrap(self.params)
        self.told = None  # the wrapper that has warned of what zero_grad() keeps
        self.window = []  # (weight, {name: sum of the gradients}) of each finished micro-batch
        self.micro = None  # (weight, {name: ...}) of the current one
        self.shown = {}  # what normalize_() has divided p.grad by, for parameters that got no gradient since
        self.left = {}  # the gradients that a drop-in's last window has left in p.grad
        self.over = False  # has the window begun over such gradients?
        self.told_over = None  # the wrapper that has told so
        self.updated = False

    def wrap(self, params):
        sgd = torch.optim.SGD(list(params.values()), lr=LR)
        return fa.AccumulatingOptimizer(sgd, reduction=self.reduction, **self.kwargs)

    # -- the model of the contract

    @property
    def whole(self):
        return [*self.window, self.micro] if self.micro else self.window

    @property
    def weight(self):
        return sum(w for w, _ in self.whole)

    def gathered(self):
        """Each parameter's running sum; parameters that got no gradient are missing."""
        sums = {}
        for weight, gradients in self.whole:
            for name, g in gradients.items():
                c = weight if self.reduction == "mean" else float(weight != 0)
                sums[name] = [s + c * x for s, x in zip(sums.get(name, [0.0, 0.0]), g, strict=True)]
        return sums

    def commit(self, empty_counts):
        if self.micro is None and empty_counts:
            self.micro = (1.0, {})
        if self.micro is not None:
            self.window.append(self.micro)
            self.micro = None

    @property
    def complete(self):
        """Would a ``step()`` close the window?"""
        held = {"counted": len(self.whole), "weighed": self.weight, "caller-owned": self.limit}
        return held[self.mode] >= self.limit

    @property
    def divisor(self):
        return 1.0 if self.reduction == "none" else self.weight

    @property
    def drop_in(self):
        return self.mode == "caller-owned" and self.reduction == "none"

    def closes(self):
        """Expects the warning of a window of weight 0, or one begun over the gradient of a step."""
        if self.over and self.real is not self.told_over:
            self.told_over = self.real
            return pytest.warns(RuntimeWarning, match=r"with no zero_grad\(\) between")
        weightless = self.window and self.divisor == 0
        return pytest.warns(RuntimeWarning, match="has weight 0") if weightless else nullcontext()

    def close(self):
        sums, divisor = self.gathered(), self.divisor
        if divisor != 0:
            self.apply(sums, divisor)
        self.updated = bool(sums) and divisor != 0
        self.forget()
        self.left = sums if self.drop_in else {}

    def apply(self, sums, divisor):
        for name, s in sums.items():
            self.values[name] = [v - LR * x / divisor for v, x in zip(self.values[name], s, strict=True)]

    def forget(self):
        self.window, self.micro, self.shown, self.left, self.over = [], None, {}, {}, False

    # -- the calls

    @rule(gradients=GRADIENTS, weight=st.sampled_from([0, 1, 2, 3]), again=st.booleans())
    def backward(self, gradients, weight, again):
        if self.micro is not None and self.mode != "caller-owned":
            weight = self.micro[0]  # parts of one micro-batch share its weight
        loss = sum((self.params[k] * torch.tensor(g, dtype=torch.float64)).sum() for k, g in gradients.items())
        passes = 2 if again else 1
        with self.real.micro_batch(weight=weight):
            for _ in range(passes):
                loss.backward(retain_graph=True)
        if not self.whole:
            self.left, self.over = {}, bool(self.left)
        old = self.micro[1] if self.micro else {}
        new = {k: [passes * x for x in g] for k, g in gradients.items()}
        merged = {
            k: [a + b for a, b in zip(old.get(k, [0.0] * 2), new.get(k, [0.0] * 2), strict=True)]
            for k in {**old, **new}
        }
        self.micro = (float(weight), merged)
        self.shown = {name: divisor for name, divisor in self.shown.items() if name not in new}
        if self.mode == "caller-owned":
            self.commit(False)

    @rule()
    def step(self):
        again = self.left if not self.whole else {}
        late = {} if self.reduction != "sum" or self.micro or self.mode == "caller-owned" else {"weight": 1}
        self.commit(self.mode != "caller-owned")
        with self.closes() if self.complete and not again else nullcontext():
            self.real.step(**late)
        self.updated = bool(again)
        if again:
            self.apply(again, 1.0)
        elif self.complete:
            self.close()
        assert self.real.updated == self.updated

    @rule()
    def flush(self):
        self.commit(False)
        with self.closes():
            self.real.flush()
        self.updated = False
        if self.window:
            self.close()
        assert self.real.updated == self.updated

    @rule()
    def zero_grad(self):
        drops = self.mode == "caller-owned" or (self.mode == "counted" and self.limit == 1)
        keeps = self.micro is not None and not drops
        told = keeps and self.real is not self.told  # once by every wrapper
        with pytest.warns(RuntimeWarning, match="part of the next micro-batch") if told else nullcontext():
            self.real.zero_grad()
        self.told = self.real if keeps else self.told
        if drops:
            self.forget()

    @rule()
    def reset(self):
        self.real.reset()
        self.forget()

    @rule()
    def through_a_checkpoint(self):
        file = io.BytesIO()
        torch.save(self.real.state_dict(), file)
        file.seek(0)
        self.params = {k: Parameter(p.detach().clone()) for k, p in self.params.items()}
        self.real = self.wrap(self.params)
        self.real.load_state_dict(torch.load(file, weights_only=True))
        self.left, self.over = {}, False

    @rule()
    def deepcopy(self):
        self.params, self.real = copy.deepcopy((self.params, self.real))
        self.left, self.over = {}, False

    @precondition(lambda self: (self.window or self.micro) and self.complete)
    @rule()
    def normalize(self):
        self.real.normalize_()
        self.shown = dict.fromkeys(self.gathered(), self.divisor or 1.0)

    @invariant()
    def same(self):
        if not hasattr(self, "real"):
            return
        for name, p in self.params.items():
            torch.testing.assert_close(p.tolist(), self.values[name])
        if self.window or self.micro:
            sums = self.gathered()
            for name, p in self.params.items():
                assert (p.grad is None) == (name not in sums), name
                if p.grad is not None:
                    torch.testing.assert_close(p.grad.tolist(), [x / self.shown.get(name, 1.0) for x in sums[name]])


# Some orders look like the mistakes that these warnings are for. When they are given is tested in
# test_step.py and test_loops.py.
TestCallOrders = pytest.mark.filterwarnings("ignore:the first micro-batch had", r"ignore:flush\(\) takes")(
    CallOrders.TestCase
)
TestCallOrders.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
