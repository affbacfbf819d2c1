"""Where the sums are: flat, aligned storage, of which every ``p.grad`` is a view, and what must stay true about it."""
