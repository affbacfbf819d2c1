"""Tests with real frameworks, at the versions that pyproject.toml pins. Not part of the other tests, which need none of them."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # models and data are made here


def pytest_configure(config):
    # Frameworks warn of each other and of the machine; what this package warns of is a RuntimeWarning, and stays an error.
    for category in ("UserWarning", "FutureWarning", "DeprecationWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}")
