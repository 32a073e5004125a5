"""Extent of a test run: everything at night, with HYPOTHESIS_PROFILE=nightly, and samples by day."""

import os


def is_nightly() -> bool:
    """Whether simulations and searches run at full length."""
    return os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
