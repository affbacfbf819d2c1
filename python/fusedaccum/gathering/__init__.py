"""Micro-batches on their way into the open window: added to its buffers, counted, or rejected."""
