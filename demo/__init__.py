"""The demo (``make demo``): real training in micro-batches against the big batch they stand for."""
