"""Hypothesis profiles: HYPOTHESIS_PROFILE=nightly looks twenty times as far."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "normal", max_examples=100, deadline=None, report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("normal"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "normal"))
