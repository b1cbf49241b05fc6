"""A barrier with a timeout, in the order of no other collective."""

from __future__ import annotations

import threading
import time
from concurrent import futures

import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Reduction
from tfscale.comm.eager import raise_own_errors
from tfscale.config import ExchangeError, settings


class Meeting:
    """A barrier with a timeout for the ranks of a group.

    An eager collective that a rank never joins would break the order of all later ones. So this
    barrier is a traced function, which has its own plan, and runs on a thread. It has two rounds:
    the first ends when a thread of each rank has arrived, the second tests whether each rank still
    waits. A rank that times out continues, and its thread informs late ranks in the second round.
    """

    def __init__(self, group: Group, shared: str, hint: str = "") -> None:
        """Trace the rounds, on all ranks of the group at the same point of their program.

        Args:
            group: The ranks.
            shared: What they share, for errors.
            hint: The end of the error after a timeout.
        """
        self._shared, self._hint = shared, hint

        def least_over_ranks(value: tf.Tensor) -> tf.Tensor:
            call = Call(group, "meeting of ranks", stream="meeting", is_patient=True)
            return runtime.backend().allreduce([value], call, Reduction(ReduceOp.MIN))[0]

        spec = tf.TensorSpec([], tf.int32)
        self._least = tf.function(least_over_ranks, input_signature=[spec], autograph=False)
        self._least.get_concrete_function()
        self._lock = threading.Lock()
        self._is_wanted = self._is_met = False
        self._attempt: futures.Future[bool] = futures.Future()
        self._attempt.set_result(False)

    def wait(self, what: str) -> None:
        """Wait for all ranks, TFSCALE_SAVE_TIMEOUT_S at most. Collective, on the main thread.

        After a timeout the attempt stays pending, and the next call resumes it.

        Args:
            what: The call that all ranks must make, for errors.

        Raises:
            ExchangeError: Not all ranks arrived in time, or one has ended.
        """
        timeout_s = settings().save_timeout_s
        deadline = time.monotonic() + timeout_s
        alone = (
            f"{what} must run on all ranks, which share {self._shared}. Received: {what} on rank "
            f"{runtime.rank()}, and"
        )
        self._is_wanted = True
        while True:
            if self._attempt.done():
                self._attempt, self._is_met = futures.Future(), False
                threading.Thread(target=self._run, name="tfscale-meeting", daemon=True).start()
            futures.wait([self._attempt], max(deadline - time.monotonic(), 0.0))
            with self._lock:
                if not self._attempt.done() and not self._is_met:
                    self._is_wanted = False
                    raise ExchangeError(
                        f"{alone} not all other ranks joined within {timeout_s:g} s "
                        f"(TFSCALE_SAVE_TIMEOUT_S). Call it on every rank{self._hint}."
                    )
            # All ranks are in the second round, which takes no time, or one has ended.
            try:
                if raise_own_errors(self._attempt.result):
                    return
            except ExchangeError as error:
                raise ExchangeError(f"{alone} {error}") from None

    def _run(self) -> None:
        try:
            self._least(tf.constant(1))
            with self._lock:
                self._is_met, is_wanted = True, self._is_wanted
            self._attempt.set_result(bool(self._least(tf.constant(int(is_wanted)))))
        except Exception as error:  # Raised where a rank waits.
            self._attempt.set_exception(error)
