"""The nightly profile: HYPOTHESIS_PROFILE=nightly runs simulations at full length."""

import os


def is_nightly() -> bool:
    """Whether this run is the night's."""
    return os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
