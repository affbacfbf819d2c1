"""The demo: real training with micro-batches, compared with the big batch that they stand for. Run it with ``make demo``."""
