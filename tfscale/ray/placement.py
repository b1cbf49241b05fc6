"""The resources that Ray reserves for ranks, and messages about what a cluster has."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from tfscale.config import ConfigError

# Seconds between looks at a placement group, and until a line says that it is waited for.
_LOOK_S, _QUIET_S = 1.0, 10.0


@dataclass(frozen=True)
class Placement:
    """A placement group, and the ranks that its bundles hold.

    Attributes:
        group: Placement group of Ray.
        ranks: Number of ranks of each bundle that holds any, in the order of ranks.
        each: Resources of a rank.
        timeout_s: Limit of waiting for the group, in seconds.
        is_ours: Whether the group is removed at the end.
    """

    group: PlacementGroup
    ranks: Mapping[int, int]
    each: Mapping[str, float]
    timeout_s: float
    is_ours: bool

    @staticmethod
    def of(
        group: PlacementGroup | None,
        each: Mapping[str, float],
        size: int,
        per_bundle: int,
        strategy: str,
        timeout_s: float,
    ) -> Placement:
        """The places for ranks in a new placement group, or in the given one."""
        if group is None:
            counts = [min(per_bundle, size - i) for i in range(0, size, per_bundle)]
            bundles = [{name: n * amount for name, amount in each.items()} for n in counts]
            group = ray.util.placement_group(bundles, strategy=strategy)
            return Placement(group, dict(enumerate(counts)), each, timeout_s, True)
        specs, ranks, n_left = group.bundle_specs, {}, size
        for index in [*range(1, len(specs)), 0]:
            fits = min(
                specs[index].get(name, 0) / amount for name, amount in each.items() if amount
            )
            room = int(fits + 1e-6)  # 0.3 / 0.1 is less than 3
            if taken := min(room, n_left):
                ranks[index] = taken
                n_left -= taken
        if n_left:
            raise ConfigError(
                f"placement_group must have room for num_workers. Received: {size} ranks with "
                f"{_describe(each)} each, {n_left} too many for bundles {specs}. Use fewer ranks, "
                "or a larger group."
            )
        return Placement(group, ranks, each, timeout_s, False)

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Free the resources of a group that was made for the ranks."""
        if self.is_ours:
            ray.util.remove_placement_group(self.group)

    def wait(self, deadline: float | None = None) -> None:
        """Wait until Ray has reserved all resources.

        Raises:
            ConfigError: There was no room until `deadline` (`time.monotonic`), by default that of
                `timeout_s` from now on.
        """
        started, has_said = time.monotonic(), False
        deadline = started + self.timeout_s if deadline is None else deadline
        while not self.group.wait(_LOOK_S):
            now = time.monotonic()
            if now >= deadline:
                raise self.too_few()
            if not has_said and now - started >= _QUIET_S:
                has_said = True
                say(f"tfscale: waiting for {self.wanted()}; {_describe_cluster()}.\n")

    def wanted(self) -> str:
        """The ranks and their resources, for messages."""
        return f"{sum(self.ranks.values())} ranks with {_describe(self.each)} each"

    def too_few(self) -> ConfigError:
        """The error for a cluster without room for the ranks."""
        strategy = ray.util.placement_group_table(self.group).get("strategy", "")
        return ConfigError(
            f"num_workers must fit into the cluster. Received: {self.wanted()} ({strategy}), not "
            f"placed in {self.timeout_s:g} s; {_describe_cluster()}. Start nodes, use fewer or "
            "smaller ranks, or wait longer (timeout_s=)."
        )

    def bundles_by_node(self) -> dict[str, list[int]]:
        """The bundles with ranks on each node, by the node's id."""
        node_of = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        bundles: dict[str, list[int]] = {}
        for index in self.ranks:
            bundles.setdefault(node_of.get(index, ""), []).append(index)
        return bundles


def _describe(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _describe_cluster() -> str:
    """The nodes of the cluster with their resources, and what is free, for messages."""

    def countable(resources: Mapping[str, float]) -> dict[str, float]:
        hidden = ("node:", "memory", "object_store_memory", "bundle_group")
        shown = {n: v for n, v in resources.items() if not n.startswith(hidden)}
        return {n: v for n, v in shown.items() if "_group_" not in n}

    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = "; ".join(
        f"{name_of(node)} has {_describe(countable(node['Resources'])) or 'nothing'}"
        for node in nodes
    )
    free = _describe(countable(ray.available_resources())) or "nothing"
    return f"of {len(nodes)} nodes, {each}; free are in all {free}"


def name_of(node: Mapping[str, Any]) -> str:
    """A name of a node, distinct also where nodes share a host: its address and part of its id."""
    return f"{node['NodeManagerAddress'].replace(':', '.')}-{node['NodeID'][:6]}"


def say(text: str) -> None:
    """Write a line to standard error."""
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()
