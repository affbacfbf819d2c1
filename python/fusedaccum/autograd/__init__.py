"""How fresh gradients get from autograd to what adds them: hooks, buckets, passes, streams."""
