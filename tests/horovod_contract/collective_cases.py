"""Every case of tests/parallel/cases_collectives_*.py on the ranks that a launcher started.

`tests/parallel` runs them under MPI; this is for launchers that have none.
"""

import importlib

import tfscale
from tests.parallel.test_parallel import find_cases
from tfscale.comm import runtime


def main() -> None:
    """Run those that Horovod can pass; print their number."""
    tfscale.init()
    print(f"backend {runtime.backend().name} .", flush=True)
    cases = [
        case for case, size, _ in find_cases() if "collectives_" in case and size == tfscale.size()
    ]
    for case in cases:
        module, _, name = case.partition(":")
        function = getattr(importlib.import_module(module), name)
        if not hasattr(function, "engine_only"):
            function()
            tfscale.barrier()
    print(f"rank {tfscale.rank()} has run {len(cases)} cases .", flush=True)


if __name__ == "__main__":
    main()
