"""Fixtures that every test folder may use."""

from tests.servers import private_redis, redis_server, valkey_server

__all__ = ["private_redis", "redis_server", "valkey_server"]
