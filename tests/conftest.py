"""Fixtures that every test folder may use. No example of Hypothesis's is too slow: the machine may be busy."""

from hypothesis import HealthCheck, settings

from tests.servers import private_redis, redis_server, valkey_server

__all__ = ["private_redis", "redis_server", "valkey_server"]

settings.register_profile(
    "unhurried",
    settings.get_profile(settings.get_current_profile_name()),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("unhurried")
