"""Why a process can't start: its settings or its machine must be changed first."""

from __future__ import annotations


class StartupError(Exception):
    """Can't start with these settings or on this machine. The message says what to change; the process exits with 2."""


class SettingsError(StartupError):
    """A setting is unknown, missing or has a bad value."""


class PortTaken(StartupError):
    """A fixed port of this process can't be bound."""
