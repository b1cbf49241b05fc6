"""Ranks played by threads of one process, for unit tests of callbacks without MPI."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

import tfscale

# Python may stand still for 60 s: tf.data's tuner can miss the end of an iterator, whose deletion
# then waits, with Python's lock held, until the tuner looks again.
TIMEOUT_S = 150.0


@contextlib.contextmanager
def _replaced(stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Replace names of modules of tfscale.comm, and those of tfscale that are the same."""
    import tfscale.keras  # needs TensorFlow

    with contextlib.ExitStack() as stack:
        for path_in_comm, stand_in in stand_ins.items():
            name = path_in_comm.partition(".")[2]
            modules = [module for module in (tfscale, tfscale.keras) if hasattr(module, name)]
            public = [f"{module.__name__}.{name}" for module in modules]
            for path in (f"tfscale.comm.{path_in_comm}", *public):
                stack.enter_context(mock.patch(path, stand_in))
        yield


@contextlib.contextmanager
def pretend_rank(rank: int = 0, size: int = 1, local_size: int = 1) -> Iterator[None]:
    """Let this process seem to be a rank of a job, for code that looks at numbers only.

    Examples:
        >>> with tfscale.testing.pretend_rank(3, 8, local_size=4):
        ...     print(tfscale.rank(), tfscale.size(), tfscale.local_size())
        3 8 4
    """
    numbers = {"rank": rank, "size": size, "local_size": local_size}
    with _replaced({f"runtime.{name}": lambda n=n: n for name, n in numbers.items()}):
        yield


class FakeRanks:
    """Runs a function once per rank, each in a thread, with collectives between the threads.

    Ranks have `tfscale.rank`, `size`, `allreduce`, `grouped_allreduce`, `allgather_object` and
    `broadcast_variables`, called eagerly on all ranks: enough for callbacks that are called by
    hand. Models of several ranks do not train together; for that see `tfscale.testing.spawn`. Call
    `tfscale.init()` first.

    Args:
        size: Number of ranks.

    Examples:
        >>> tfscale.init()
        >>> ranks = tfscale.testing.FakeRanks(3)
        >>> ranks.run(lambda rank: (tfscale.size(), tfscale.allgather_object(rank)))
        [(3, [0, 1, 2]), (3, [0, 1, 2]), (3, [0, 1, 2])]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._local = threading.local()
        self._changed = threading.Condition()
        self._rounds: list[dict[int, Any]] = []
        self._ended: set[int] = set()

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Return `body(rank)` of all ranks; what a rank raised is returned in its place."""
        results: list[Any] = [None] * self.size
        self._rounds, self._ended = [], set()

        def play(rank: int) -> None:
            self._local.rank, self._local.round = rank, 0
            try:
                results[rank] = body(rank)
            except Exception as error:
                results[rank] = error
            with self._changed:
                self._ended.add(rank)
                self._changed.notify_all()

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(self.size)]
        with self._played():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results

    def _exchange(self, item: Any, name: str | None = None, **_: Any) -> list[Any]:
        index = self._local.round
        self._local.round += 1
        with self._changed:
            if index == len(self._rounds):
                self._rounds.append({})
            items = self._rounds[index]
            items[self._local.rank] = item
            self._changed.notify_all()
            while len(items) < self.size:
                if self._ended - set(items) or not self._changed.wait(TIMEOUT_S):
                    raise TimeoutError(f"Exchange {index} has only ranks {sorted(items)}.")
        return [items[rank] for rank in range(self.size)]

    def _broadcast_variables(self, variables: Any, root_rank: int = 0, **_: Any) -> None:
        values = self._exchange([v.numpy() for v in variables])[root_rank]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def _allreduce(
        self,
        tensor: Any,
        op: str | None = None,
        *,
        average: bool | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        **_: Any,
    ) -> Any:
        if average is not None or op is None:
            op = tfscale.Sum if average is False else tfscale.Average
        items = [np.asarray(item) for item in self._exchange(tensor)]
        values = np.stack(items if prescale_factor == 1 else [prescale_factor * i for i in items])
        reduce: Any = {
            tfscale.Average: np.mean,
            tfscale.Sum: np.sum,
            tfscale.Max: np.max,
            tfscale.Min: np.min,
            tfscale.Product: np.prod,
        }[op]
        result = reduce(values, axis=0)
        return result if postscale_factor == 1 else postscale_factor * result

    def _grouped_allreduce(self, tensors: Any, *args: Any, **options: Any) -> list[Any]:
        return [self._allreduce(tensor, *args, **options) for tensor in tensors]

    @contextlib.contextmanager
    def _played(self) -> Iterator[None]:
        stand_ins = {
            "runtime.rank": lambda: self._local.rank,
            "runtime.size": lambda: self.size,
            "runtime.is_single": lambda: False,
            "runtime.is_initialized": lambda: True,
            "runtime.global_process_set.ranks": list(range(self.size)),
            "objects.allgather_object": self._exchange,
            "objects.broadcast_variables": self._broadcast_variables,
            "collectives.allreduce": self._allreduce,
            "collectives.grouped_allreduce": self._grouped_allreduce,
        }
        with _replaced(stand_ins), mock.patch("threading.main_thread", threading.current_thread):
            yield
