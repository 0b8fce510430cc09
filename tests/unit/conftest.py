"""Settings of the unit tests."""

from hypothesis import HealthCheck, settings

# No deadline for Hypothesis: a slow machine is not a failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
