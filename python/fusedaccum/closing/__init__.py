"""A window's end: what it comes to, whether it may be applied, and the inner optimizer's step."""
