"""What a window is: its settings, which micro-batches it holds, what they weigh, and what is reported about it."""
