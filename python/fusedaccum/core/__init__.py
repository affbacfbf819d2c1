"""Gradient accumulation: windows of micro-batches, what they add up, and the optimizer that steps
with it. It knows no feature by name.

Hooks bring fresh gradients (:mod:`fusedaccum.autograd`), and call BackwardPasses. To be read in
this order:

optimizer     the public face: what a training loop calls
config        its arguments, and what they may be
window        when a window closes; what is counted for it and for a micro-batch, their states
ledger        the open window: what it weighs, when it is complete, what divides its sum
backward      backward passes, which open micro-batches and bring them gradients
accumulation  a micro-batch from its opening to its place in the window
adding        a bucket of gradients is scaled and added to its buffers
buffers, sums, norms  where the sums are, and what is done to them
grad_views    what p.grad shows of them, and what other code does to it
apply         a window's end: divided, clipped, stepped with, reported
parameters    whose gradients are accumulated
checkpoint    the open window as tensors and plain values
proxy, closures  how the wrapper stands for its inner optimizer, and what that may ask of a closure
extension     how features take part
ranks         one process alone: what others, which share windows, answer in its place
"""
