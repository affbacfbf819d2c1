"""A training that an earlier version has broken off by a checkpoint, and how it went on there.

``python tests/old_checkpoints.py FOLDER`` writes both, with the version that is to stay readable.
"""

import socket
import sys
from pathlib import Path

import fusedaccum as fa
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

OF = Path(__file__).parent / "data/bb9b5bd"
BEFORE, AFTER = 6, 5  # micro-batches before the checkpoint, inside the second window, and after it
WITH_NAN = 4
KINDS = {
    "window": {"accum_steps": 4, "max_grad_norm": 1.0, "noise_scale": 0.9, "nonfinite": "skip_micro_batch"},
    "masters": {"accum_steps": 4, "master_weights": True},
    "two_ranks": {"accum_steps": 4, "noise_scale": 0.9},
}


def started(kind, process_group=None):
    """A model and its wrapper, with the same weights wherever this runs."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.arange(p.numel()).view(p.shape) % 5 / 4 - 0.4)
    net.to(torch.bfloat16 if kind == "masters" else torch.float32)
    fa.accumulate_batchnorm(net)
    inner = torch.optim.AdamW(net.parameters(), lr=0.05)
    return net, fa.AccumulatingOptimizer(inner, process_group=process_group, **KINDS[kind])


def train(kind, net, opt, steps, rank):
    for i in steps:
        n = 2 + i % 3
        x = (torch.arange(4 * n).view(n, 4) * (3 * i + rank + 1) % 7 - 3) / 4
        if i == WITH_NAN and kind == "window":
            x[0] = torch.nan
        opt.backward(net(x.to(net[0].weight.dtype)).square().mean(), weight=n)
        opt.step()
        opt.zero_grad()


def ended(net, opt):
    """What the training has come to, by name.

    The model, the master weights, the inner optimizer's state, and the loss of the window that has
    closed since the checkpoint.
    """
    now = opt.state_dict()
    masters = {f"master.{i}": master for i, master in now["fusedaccum"].get("masters", {}).items()}
    state = {f"{name}.{i}": value for i, of in now["state"].items() for name, value in of.items()}
    return net.state_dict() | masters | state | {"loss": opt.last_window.loss}


# A bias before BatchNorm has a gradient of rounding errors alone, which AdamW makes as large as
# any: it depends on the machine, and the running mean with it. The running variance does not, and
# is pooled from the same means.
OF_THE_MACHINE = {"0.bias", "1.running_mean", "master.1", "exp_avg.1", "exp_avg_sq.1"}


def resumed(kind, rank=0, process_group=None):
    """What the resumed training comes to, and what it came to where the checkpoint was made."""
    net, opt = started(kind, process_group)
    saved = torch.load(OF / f"{kind}{rank}.pt")
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    train(kind, net, opt, range(BEFORE, BEFORE + AFTER), rank)
    both = ended(net, opt), torch.load(OF / f"{kind}{rank}_after.pt")
    return [{name: value for name, value in of.items() if name not in OF_THE_MACHINE} for of in both]


def write(folder, kind, rank=0, process_group=None):
    net, opt = started(kind, process_group)
    train(kind, net, opt, range(BEFORE), rank)
    saved = {"net": {k: v.clone() for k, v in net.state_dict().items()}, "opt": opt.state_dict()}
    torch.save(saved, folder / f"{kind}{rank}.pt")
    train(kind, net, opt, range(BEFORE, BEFORE + AFTER), rank)
    torch.save(ended(net, opt), folder / f"{kind}{rank}_after.pt")


def _write_on_rank(rank, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    write(folder, "two_ranks", rank, dist.group.WORLD)
    dist.destroy_process_group()


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("window", "masters"):
        write(folder, kind)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_write_on_rank, (port, folder), nprocs=2)


if __name__ == "__main__":
    main()
