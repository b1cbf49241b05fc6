"""Memory does not grow with the steps; `make leaks` measures 2,000 of each exchange."""

import tfscale
from tests.faults.leaks import EXCHANGES, measure, resident_bytes
from tests.helpers.cases import sizes

STEPS = 400
# A step's gradients are 130 KiB. What the allocator does in so few steps stays below this.
LIMIT_BYTES = 16 * 1024


@sizes(2, timeout_s=300)
def case_memory_stays_flat():
    for exchange in EXCHANGES:
        growth = tfscale.allgather_object(measure(exchange, STEPS))
        assert max(growth) < LIMIT_BYTES, (exchange, growth)


@sizes(2)
def case_process_sets_come_and_go():
    """A set that was removed keeps nothing: MPI's communicators took 82 KB each."""

    def churn(n):
        for _ in range(n):
            pair = tfscale.add_process_set([0, 1])
            tfscale.allreduce([1.0], process_set=pair)
            assert tfscale.remove_process_set(pair)

    churn(50)
    before = resident_bytes()
    churn(300)
    assert (resident_bytes() - before) / 300 < LIMIT_BYTES
