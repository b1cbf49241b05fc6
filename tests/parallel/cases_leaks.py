"""Memory does not grow with the steps; `make leaks` measures 2,000 of each exchange."""

from __future__ import annotations

import tfscale
from tests.faults.leaks import EXCHANGES, measure
from tests.helpers.spawn import sizes

STEPS = 400
# A step's gradients are 130 KiB. What the allocator does in so few steps stays below this.
LIMIT_BYTES = 16 * 1024


@sizes(2, timeout_s=300)
def case_memory_stays_flat():
    for exchange in EXCHANGES:
        growth = tfscale.allgather_object(measure(exchange, STEPS))
        assert max(growth) < LIMIT_BYTES, (exchange, growth)
