"""What is built upon the wrapper and its functional layer: answers that people would otherwise write for themselves."""
