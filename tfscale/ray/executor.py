"""Horovod's `RayExecutor`; its calls are jobs of `tfscale.ray.run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from tfscale.comm.process import discover
from tfscale.config import ConfigError, check_integer, environment, require
from tfscale.ray import job
from tfscale.ray.placement import Placement

_ELASTIC = "Jobs restart instead of changing their size: reset_limit=3 replaces lost nodes."
_INTERFACE = (
    "Name it by a variable of MPI, in extra_env_vars: see 'Unattended jobs' in the documentation."
)


@dataclass(frozen=True)
class Settings:
    """Settings of a `RayExecutor`.

    Attributes:
        placement_group_timeout_s: Seconds to wait for the cluster's resources.
    """

    placement_group_timeout_s: float = 100


class RayExecutor:
    """Horovod's interface to Ray: reserve resources, call functions on ranks, free the resources.

    Each call is a job of new processes (`tfscale.ray.run`), which begins with `tfscale.init()`. So
    nothing is kept on the ranks between calls: train, evaluate and return weights in one function.

    Args:
        settings: From `create_settings`, or None.
        num_workers: Number of ranks; or give the next two.
        num_hosts: Number of nodes, each with as many ranks.
        num_workers_per_host: Ranks on each of `num_hosts` nodes.
        cpus_per_worker: CPUs that Ray reserves for each rank.
        use_gpu: Must be False.
        gpus_per_worker: Must be 0 or None.
        use_current_placement_group: Use the placement group of the caller, a task or an actor, if
            it has one that captures children.
        min_workers: Refused, as are `max_workers` and `cooldown_range` of elastic jobs.
        max_workers: Refused.
        reset_limit: Number of restarts after the failure of a rank or a node, at most.
        cooldown_range: Refused.
        elastic_timeout: Not needed.
        override_discovery: Not needed.
        num_slots: Earlier name of `num_workers_per_host`.
        cpus_per_slot: Earlier name of `cpus_per_worker`.

    Raises:
        ConfigError: An argument is invalid, or has no meaning here.

    Examples:
        >>> from tfscale.ray import RayExecutor  # doctest: +SKIP
        >>> executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)  # doctest: +SKIP
        >>> executor.start()  # doctest: +SKIP
        >>> executor.run(train, kwargs={"rate": 0.5})  # doctest: +SKIP
        [(0, 1.0), (1, 1.0)]
        >>> executor.shutdown()  # doctest: +SKIP
    """

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
        *,
        num_slots: int | None = None,
        cpus_per_slot: float | None = None,
    ) -> None:
        _refuse(_ELASTIC, min_workers=min_workers, max_workers=max_workers)
        _refuse(_ELASTIC, cooldown_range=cooldown_range)
        remedy = "tfscale trains on CPUs: leave it out."
        _refuse(remedy, use_gpu=use_gpu or None, gpus_per_worker=gpus_per_worker or None)
        per_host = 1
        if num_hosts is not None:
            _refuse("Give it or num_hosts.", num_workers=num_workers)
            slots = num_workers_per_host if num_slots is None else num_slots
            per_host = check_integer("num_workers_per_host", slots, 1)
            num_workers = check_integer("num_hosts", num_hosts, 1) * per_host
        self._size = check_integer("num_workers", num_workers, 1)
        self._per_host, self._has_hosts = per_host, num_hosts is not None
        self._cpus = cpus_per_worker if cpus_per_slot is None else cpus_per_slot
        require(self._cpus > 0, "cpus_per_worker", "above 0", self._cpus)
        self._restarts = check_integer("reset_limit", reset_limit or 0, 0)
        self._timeout_s = getattr(settings, "placement_group_timeout_s", 100)
        self._uses_current = use_current_placement_group
        self._placement: Placement | None = None
        self._make: Callable[[], Any] = _nothing
        self._env: dict[str, str] = {}

    @staticmethod
    def create_settings(
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Any = None,
    ) -> Settings:
        """The settings of an executor.

        Args:
            timeout_s: Not needed: TFSCALE_START_S limits the start.
            ssh_identity_file: Not needed: Ray reaches the nodes.
            ssh_str: Not needed.
            placement_group_timeout_s: Seconds to wait for the cluster's resources.
            nics: Refused.

        Raises:
            ConfigError: `nics` is given.
        """
        _refuse(_INTERFACE, nics=nics)
        return Settings(placement_group_timeout_s)

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Reserve the resources, and wait for them.

        Args:
            executable_cls: Class of the object that `execute` gives to its function. Each call
                makes one on each rank.
            executable_args: Arguments of the class by position.
            executable_kwargs: Arguments of the class by name.
            extra_env_vars: Environment variables of the ranks.

        Raises:
            ConfigError: The cluster has no room for the ranks within the limit.
        """
        if self._placement is not None:
            raise ConfigError(
                "start() is called once. Received: another call. Call shutdown() before."
            )
        job.connect()
        if executable_cls is not None:
            args, kwargs = tuple(executable_args or ()), dict(executable_kwargs or {})
            self._make = lambda: executable_cls(*args, **kwargs)
        self._env = dict(extra_env_vars or {})
        current = get_current_placement_group() if self._uses_current else None
        strategy = "STRICT_SPREAD" if self._has_hosts else "PACK"
        self._placement = Placement.of(
            current, {"CPU": self._cpus}, self._size, self._per_host, strategy, self._timeout_s
        )
        try:
            self._placement.wait()
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Any = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on all ranks; return the results by rank.

        Args:
            fn: The function, which begins with `tfscale.init()`.
            args: Arguments by position.
            kwargs: Arguments by name.
            callbacks: Refused, if there are any.

        Raises:
            ConfigError: An argument is invalid, or `start` has not been called.
            RankError: The function failed on a rank, or a node was lost.
        """
        _refuse("Print, or write files in the function.", callbacks=callbacks or None)
        return job.run(fn, args or (), kwargs, **self._options())

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Begin a call of `run` in a task; return the results' `ray.ObjectRef`s by rank."""
        task = ray.remote(job.run).options(num_cpus=0, num_returns=self._size)
        refs = task.remote(fn, args or (), kwargs, **self._options())
        return [refs] if self._size == 1 else refs

    def execute(self, fn: Callable[[Any], Any], callbacks: Any = None) -> list[Any]:
        """Call `fn(executable)` on all ranks, with an object of `executable_cls`; see `run`."""
        return self.run(_call_with, (fn, self._make), callbacks=callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0 alone; return its result."""
        return self.run(_call_on_first, (fn, self._make))[0]

    def shutdown(self) -> None:
        """Free the resources."""
        placement, self._placement = self._placement, None
        if placement is not None:
            placement.remove()

    def _options(self) -> dict[str, Any]:
        if self._placement is None:
            raise ConfigError(
                "RayExecutor must be started first. Received: a call before start() or after "
                "shutdown(). Call start()."
            )
        group: PlacementGroup = self._placement.group
        return {
            "num_workers": self._size,
            "cpus_per_worker": self._cpus,
            "placement_group": group,
            "max_restarts": self._restarts,
            "timeout_s": self._timeout_s,
            "env": self._env,
        }


def _refuse(remedy: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"{name} of Horovod's RayExecutor has no meaning here. Received: {name}={value!r}. "
                f"{remedy}"
            )


def _nothing() -> None:
    """The executable where no class was given, as Horovod has it."""


def _call_with(fn: Callable[[Any], Any], make: Callable[[], Any]) -> Any:
    return fn(make())


def _call_on_first(fn: Callable[[Any], Any], make: Callable[[], Any]) -> Any:
    launch = discover(environment())
    return fn(make()) if launch is None or launch.rank == 0 else None
