"""Machine models: costs of messages, sums and operations on a cluster."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfscale.config import PlanError
from tfscale.plan.layers import LayerTable


@dataclass(frozen=True)
class Link:
    """Connection of a rank to the others of its group: alpha and 1 / beta of [T] eq. 4.1."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class LayerTimes:
    """Measured seconds per layer of one model, by the layer's name."""

    batch: int  # samples per rank they were measured with
    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]  # input gradients and weight gradients together
    rest_s: float = 0.0  # part of a step that belongs to no layer
    # For dense layers: number of rows of the whole batch, then seconds of the weight gradient for a
    # rank's own rows, for all rows, and of a rank's part of the weight gradient for all rows.
    gradient_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    n_values: int = 0  # trainable values of the model; 0 if unknown

    def misfit(self, table: LayerTable) -> str:
        """Return why these are not the times of a model, whose layers Keras may have renumbered."""
        if self.n_values not in (0, table.n_values):
            return f"times of one of the same name with {self.n_values}"
        missing = [layer.name for layer in table.layers if layer.name not in self.forward_s]
        return f"no times for {', '.join(missing[:3])}" if missing else ""


@dataclass(frozen=True)
class Machine:
    """A cluster of equal hosts. Bandwidths are per host and direction."""

    name: str
    latency_s: float  # of a message between hosts
    bytes_per_s: float  # of a host's link, shared by its ranks
    reduce_bytes_per_s: float  # input of a local sum, per rank
    flops_per_s: float  # of a rank, for large matrix products
    memory_bytes_per_s: float  # of a rank, for operations that are limited by memory
    # Samples per rank at which matrix products run at half of `flops_per_s`: the curve is
    # batch / (batch + half_batch).
    half_batch: float = 0.0
    mpi_s_per_byte: float = 0.0  # time of MPI's own allreduce besides its messages
    ranks_per_host: int = 1
    host_latency_s: float | None = None  # between ranks of one host; None: as between hosts
    host_bytes_per_s: float | None = None  # of a rank within its host; None: as between hosts
    step_s: float = 0.0  # part of every step that no layer accounts for
    # Relative speed of computation during messages, and of messages during computation: less than 1
    # where ranks, sums and copies share cores.
    compute_share: float = 1.0
    message_share: float = 1.0
    layer_times: Mapping[str, LayerTimes] = field(default_factory=dict)  # by name of the model
    spread: Mapping[str, float] = field(default_factory=dict)  # relative spread of measured fields
    note: str = ""  # where the numbers come from

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int | float):
                continue
            least = 0.0 if item.name in _MAY_BE_ZERO else math.ulp(0.0)
            if not least <= value < math.inf:
                raise PlanError(
                    f"{item.name} of a machine must be a number above 0, times 0 or more. "
                    f"Received: {item.name}={value!r}. Measure it with tfscale tune links."
                )

    def n_hosts(self, n_ranks: int) -> int:
        """Return the number of hosts of the first `n_ranks` ranks."""
        return -(-n_ranks // self.ranks_per_host)

    def messages_s(self, n_ranks: int) -> float:
        """Return the time of a rank's messages, without bytes, in an alltoall or an allgather.

        A rank sends one message to each other host. Inside of its host it sends its own part to the
        other ranks, and a part of each other host, so that there are `n_ranks` - 1 in all.
        """
        n_hosts = self.n_hosts(n_ranks)
        return (n_hosts - 1) * self.latency_s + (n_ranks - n_hosts) * self._inside_s

    @property
    def _inside_s(self) -> float:
        inside = self.latency_s if self.host_latency_s is None else self.host_latency_s
        return min(inside, self.latency_s)

    def link(self, n_ranks: int) -> Link:
        """Return the slowest link among the first `n_ranks` ranks.

        A vector crosses the link of a host once, whatever the number of its ranks, each of which
        has the bandwidth at which that takes as long as its own part of the vector.
        """
        inside = self.bytes_per_s if self.host_bytes_per_s is None else self.host_bytes_per_s
        # Never slower than between hosts when all ranks of a host send.
        inside = max(inside, self.bytes_per_s / self.ranks_per_host)
        if n_ranks <= self.ranks_per_host:
            return Link(self._inside_s, inside)
        across = self.bytes_per_s * (1 - 1 / n_ranks) / (1 - 1 / self.n_hosts(n_ranks))
        return Link(self.latency_s, min(across, inside))

    def with_times(self, model: str, times: LayerTimes) -> Machine:
        """Return the machine with the measured times of a model."""
        return dataclasses.replace(self, layer_times={**self.layer_times, model: times})

    def save(self, path: str | Path) -> None:
        """Write the machine as JSON; creates the folder."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", "utf-8")

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Read a file that `save` wrote; raises a PlanError if that fails."""
        try:
            content: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
            times = content.pop("layer_times", {})
            times = {name: LayerTimes(**own) for name, own in times.items()}
            return Machine(**content, layer_times=times)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise PlanError(
                f"machine must be one of {', '.join(PRESETS)} or a file that tfscale tune links "
                f"wrote. Received: {path} ({error})."
            ) from error


_MAY_BE_ZERO = ("half_batch", "mpi_s_per_byte", "step_s", "latency_s", "host_latency_s")

# Cori's numbers are fitted to published speedups, see docs/thesis-scaling.md; the others are round
# numbers for such hardware; measure your own. In order: latency_s, bytes_per_s, reduce_bytes_per_s,
# flops_per_s, memory_bytes_per_s, half_batch, mpi_s_per_byte.
_CORI = "[T] chapter 4: one rank per host of 32 cores"
_1G = "1 Gbit/s between hosts of 8 cores"
_10G = "10 Gbit/s between hosts of 16 cores"
_HDR = "200 Gbit/s between hosts of 64 cores"
_PRESETS = (
    Machine("cori-haswell", 1.7e-6, 2.5e9, 20e9, 0.93e12, 24e9, 1.0, 2.0e-9, note=_CORI),
    Machine("ethernet-1g", 50e-6, 117e6, 4e9, 200e9, 15e9, 1.0, note=_1G),
    Machine("ethernet-10g", 30e-6, 1.1e9, 8e9, 600e9, 40e9, 1.0, note=_10G),
    Machine("infiniband-hdr", 3e-6, 22e9, 20e9, 2.5e12, 150e9, 1.0, note=_HDR),
)
PRESETS: dict[str, Machine] = {machine.name: machine for machine in _PRESETS}


def find_machine(name: str) -> Machine:
    """Return a preset by its name or load a file; raises a PlanError if there is neither."""
    return PRESETS[name] if name in PRESETS else Machine.load(name)
