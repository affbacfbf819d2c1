"""Sizes that make a small model have several buckets, collectives and stages."""

from unittest import mock


def limits(**sizes):
    """A context manager, and a decorator, in which ``fusedaccum.limits`` has these sizes."""
    size = sizes.get("bucket")
    if isinstance(size, int):
        sizes["bucket"] = lambda _: size
    return mock.patch.multiple("fusedaccum.limits", **sizes)
