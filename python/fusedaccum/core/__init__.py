"""Gradient accumulation: windows of micro-batches, what they add up, and the optimizer that steps with it. It knows no feature by name.

To be read in this order: optimizer (the public face), config (its arguments), window (what is counted), accumulation (from a gradient to
its place in the window), buffers and grad_views (where the sums are, and what ``p.grad`` shows), apply (a window's end), checkpoint,
proxy (how the wrapper stands for its inner optimizer), extension (how features take part).
"""
