"""How fresh gradients get from autograd to whoever adds them: hooks, buckets, backward passes, streams."""
