"""The names that `exchange=` takes."""

from __future__ import annotations

from typing import Any

from tfscale.config import ConfigError
from tfscale.exchange.allreduce import Allreduce
from tfscale.exchange.auto import Auto
from tfscale.exchange.base import Exchange
from tfscale.exchange.chunked import Chunked
from tfscale.exchange.sharded import Sharded

_BY_NAME = {"allreduce": Allreduce, "auto": Auto, "chunked": Chunked, "sharded": Sharded}


def resolve(exchange: Any) -> Exchange:
    """Return the strategy that a user named.

    Args:
        exchange: A name or a strategy.

    Raises:
        ConfigError: Neither.
    """
    if isinstance(exchange, str) and exchange in _BY_NAME:
        return _BY_NAME[exchange]()
    if hasattr(exchange, "exchange") and not isinstance(exchange, type):
        return exchange
    names = ", ".join(repr(name) for name in _BY_NAME)
    raise ConfigError(
        f"exchange must be one of {names} or a strategy such as tfscale.Allreduce(bucket_mb=4). "
        f"Received: exchange={exchange!r}."
    )
