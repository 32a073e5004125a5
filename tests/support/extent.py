"""Extent of a test run by HYPOTHESIS_PROFILE: that of a developer, of `scripts/test --all`, or of a night."""

import os

_PROFILE = os.environ.get("HYPOTHESIS_PROFILE")


def runs_all() -> bool:
    """Whether everything runs and not a sample: by `scripts/test --all`, and at night."""
    return _PROFILE in {"all", "nightly"}


def is_nightly() -> bool:
    """Whether simulations run at full length."""
    return _PROFILE == "nightly"
