"""AdamW with its moments in bf16: docs/memory.md shows it, for readers to copy."""

from __future__ import annotations

import torch


class AdamWInBF16(torch.optim.AdamW):
    """AdamW whose moments are in bf16, and in FP32 only while it steps."""

    steps_each_alone = True  # fusedaccum may step it in parts

    def step(self, closure=None):
        self._cast_moments(torch.float32)
        loss = super().step(closure)
        self._cast_moments(torch.bfloat16)
        return loss

    def __setstate__(self, state):  # load_state_dict() ends here, with FP32
        super().__setstate__(state)
        self._cast_moments(torch.bfloat16)

    def _cast_moments(self, dtype):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                for key in state.keys() & {"exp_avg", "exp_avg_sq"}:
                    state[key] = state[key].to(dtype)
