"""An example of an exchange of one's own: an allreduce over the rows, then the columns of a grid.

Ranks stand in a grid, as hosts in racks do. Each gradient is summed along the rows, then these sums
along the columns: two messages of few ranks each instead of one of all. docs/architecture.md walks
through this file; it passes the equality tests of the exchanges of tfscale.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfscale.comm.backends.base import Group, Reduction
from tfscale.comm.runtime import own_process_set
from tfscale.exchange.base import EXCHANGES, Exchange
from tfscale.exchange.plan import ExchangePlan, Part, Table, Wire, compile_plan
from tfscale.plan.buckets import auto_bucket_bytes, build_buckets


@dataclass(frozen=True)
class Grid(Exchange):
    """Sums over rows, then columns, of a grid as square as the number of ranks allows."""

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        n = group.size
        n_rows = max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
        return compile_plan(
            table,
            lambda specs: build_buckets(specs, auto_bucket_bytes(specs)),
            sum_part=functools.partial(GridSum, n_columns=n // n_rows),
        )


@dataclass(frozen=True)
class GridSum(Part):
    """Dense gradients whose sum every rank receives in two steps."""

    n_columns: int

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Sum along this rank's row, then the sums of rows along its column."""
        tensors = [gradients[i] for i in self.indices]
        reduction = wire.reduction(tensors)
        row, column = self._row_and_column(wire.group)
        sums = wire.allreduce(
            tensors, wire.call(self.indices, row), Reduction(prescale=reduction.prescale)
        )
        sums = wire.allreduce(
            sums, wire.call(self.indices, column), Reduction(postscale=reduction.postscale)
        )
        return dict(zip(self.indices, sums, strict=True))

    def _row_and_column(self, group: Group) -> tuple[Group, Group]:
        """Return the two groups of this rank; all ranks make all of them, in the same order."""
        ranks, m = group.ranks, self.n_columns
        rows = [own_process_set(ranks[i : i + m]) for i in range(0, len(ranks), m)]
        columns = [own_process_set(ranks[i::m]) for i in range(m)]
        return rows[group.rank // m].group(), columns[group.rank % m].group()


EXCHANGES["grid"] = "tests.helpers.grid_exchange:Grid"  # the line that registers it
