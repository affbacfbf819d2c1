"""The open window, buffers included, saved and loaded: by one process, or by many and for another number of them."""
