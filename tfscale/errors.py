"""The errors tfscale raises. Each text says what is required, what was received, what to do."""

from __future__ import annotations


class ConfigError(ValueError):
    """An argument, option or environment variable does not fit."""


class PlanError(ValueError):
    """The exchange of a model cannot be planned, or differs between ranks."""


class ExchangeError(RuntimeError):
    """Communication cannot start, failed, or would give a wrong result."""
