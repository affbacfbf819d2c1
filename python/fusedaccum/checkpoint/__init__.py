"""Saving and loading the open window, buffers included: by one process, or by many, for the same or another number of them."""
