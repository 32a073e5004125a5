"""Extent of a test run, selected by HYPOTHESIS_PROFILE: a developer's, `scripts/test --all`, or nightly."""

import os

_PROFILE = os.environ.get("HYPOTHESIS_PROFILE")


def runs_all() -> bool:
    """Whether everything runs instead of a sample: with `scripts/test --all`, and nightly."""
    return _PROFILE in {"all", "nightly"}


def is_nightly() -> bool:
    """Whether simulations run at full length."""
    return _PROFILE == "nightly"
