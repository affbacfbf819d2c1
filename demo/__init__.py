"""The demo: real training with micro-batches, beside the big batch that they stand for. Run it with ``make demo``."""
