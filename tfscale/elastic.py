"""Horovod's elastic module: what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from tfscale.config import ConfigError


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        "tfscale restarts a job from its last checkpoint instead of changing its ranks while it "
        f"runs. Received: elastic.{name}. Give fit a tfscale.callbacks.Checkpoint and start "
        "the job by `tfscale run --restarts 3 --min-np 2`."
    )
