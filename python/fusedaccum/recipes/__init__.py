"""Built upon the wrapper and functional layer: what people would otherwise write for themselves."""
