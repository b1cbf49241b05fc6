"""Tests of training code: functions and scripts on several ranks, or on ranks played by threads.

A function runs on ranks of its own from a test of any framework, with a limit of time:

```
from tfscale.testing import require_ok, spawn

def case_weights_are_equal():  # on each rank
    ...

def test_training():
    require_ok(spawn(2, [case_weights_are_equal]))
```

`tfscale.testing.inspect` shows what a running job did, such as the messages of a step.

Examples:
    >>> tfscale.init()
    >>> ranks = tfscale.testing.FakeRanks(2)  # threads of this process
    >>> sums = ranks.run(lambda rank: tfscale.allreduce(np.array([1.0 + rank]), op=tfscale.Sum))
    >>> tfscale.testing.require_identical(sums[:1], sums[1:])
    >>> sums[0].tolist()
    [3.0]
"""

from tfscale.testing import inspect
from tfscale.testing.fake_ranks import FakeRanks, pretend_rank
from tfscale.testing.processes import Finished, run_command
from tfscale.testing.ranks import (
    RankResult,
    require_close,
    require_equal_ranks,
    require_identical,
    require_ok,
    spawn,
)

__all__ = [
    "FakeRanks",
    "Finished",
    "RankResult",
    "inspect",
    "pretend_rank",
    "require_close",
    "require_equal_ranks",
    "require_identical",
    "require_ok",
    "run_command",
    "spawn",
]
