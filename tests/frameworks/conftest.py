"""Tests with real frameworks, at the versions that pyproject.toml pins.

They run apart from the other tests, which need none of them.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # the tests make their own models and data


def pytest_configure(config):
    # Frameworks warn about each other and the machine. Our warnings, RuntimeWarnings, stay errors.
    for category in ("UserWarning", "FutureWarning", "DeprecationWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}")
