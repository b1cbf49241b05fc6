"""A barrier with a timeout, in the order of no other collective."""

from __future__ import annotations

import threading
import time
from concurrent import futures

import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Reduction
from tfscale.comm.eager import raise_own_errors


class Meeting:
    """A barrier with a timeout for the ranks of a group.

    An eager collective that a rank never joins would break the order of all later ones. So this
    barrier is a traced function, which has its own plan, and runs on a thread. It has two rounds:
    the first ends when a thread of each rank has arrived, the second tests whether each rank still
    waits. A rank that times out continues, and its thread informs late ranks in the second round.
    """

    def __init__(self, group: Group) -> None:
        """Trace the rounds, on all ranks of the group at the same point of their program."""

        def least_over_ranks(value: tf.Tensor) -> tf.Tensor:
            call = Call(group, "meeting of ranks", stream="meeting")
            return runtime.backend().allreduce([value], call, Reduction(ReduceOp.MIN))[0]

        spec = tf.TensorSpec([], tf.int32)
        self._least = tf.function(least_over_ranks, input_signature=[spec], autograph=False)
        self._least.get_concrete_function()
        self._lock = threading.Lock()
        self._is_wanted = self._is_met = False
        self._attempt: futures.Future[bool] = futures.Future()
        self._attempt.set_result(False)

    def wait(self, timeout_s: float) -> bool:
        """Return whether all ranks arrive in time. Collective, on the main thread.

        After a timeout the attempt stays pending, and the next call resumes it.
        """
        deadline = time.monotonic() + timeout_s
        self._is_wanted = True
        while True:
            if self._attempt.done():
                self._attempt, self._is_met = futures.Future(), False
                threading.Thread(target=self._run, name="tfscale-meeting", daemon=True).start()
            futures.wait([self._attempt], max(deadline - time.monotonic(), 0.0))
            with self._lock:
                if not self._attempt.done() and not self._is_met:
                    self._is_wanted = False
                    return False
            # All ranks are in the second round, which takes no time.
            if raise_own_errors(self._attempt.result):
                return True

    def _run(self) -> None:
        try:
            self._least(tf.constant(1))
            with self._lock:
                self._is_met, is_wanted = True, self._is_wanted
            self._attempt.set_result(bool(self._least(tf.constant(int(is_wanted)))))
        except Exception as error:  # Raised where a rank waits.
            self._attempt.set_exception(error)
