"""Waiting for the other ranks for a limited time, without harm to what comes afterwards."""

from __future__ import annotations

import threading
import time

import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Scaling
from tfscale.comm.eager import raise_own_errors
from tfscale.config import ExchangeError


class Meeting:
    """Finds out whether all ranks of a group have come to the same place.

    An eager collective that some rank never joins would spoil the order of all later ones. So this
    one is a traced function, which has a plan of its own, and runs on a thread: who has waited
    long enough goes on, and the thread tells late ranks that nobody waits any more.
    """

    def __init__(self, group: Group) -> None:
        """Trace. All ranks of the group do this at the same place of their program.

        Args:
            group: Who has to come.
        """

        def least_over_ranks(value: tf.Tensor) -> tf.Tensor:
            call = Call(group, "meeting of ranks", stream="meeting")
            return runtime.backend().allreduce([value], call, ReduceOp.MIN, Scaling())[0]

        spec = tf.TensorSpec([], tf.int32)
        self._least = tf.function(least_over_ranks, input_signature=[spec], autograph=False)
        self._least.get_concrete_function()
        self._attempt: _Attempt | None = None

    def wait(self, timeout_s: float) -> bool:
        """Return whether all ranks have come. Collective, on the main thread.

        Args:
            timeout_s: How long to wait for them.

        Raises:
            ExchangeError: Communication failed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if self._attempt is None or self._attempt.is_over:
                self._attempt = _Attempt(self._least)
            if not self._attempt.wait(deadline - time.monotonic()):
                return False
            if self._attempt.is_success:
                return True


class _Attempt:
    """Two rounds: somebody has come from each rank; each of them still waits."""

    def __init__(self, least: tf.types.experimental.GenericFunction) -> None:
        self._least = least
        self._lock = threading.Lock()
        self._is_wanted = True
        self._is_met = False
        self._error: Exception | None = None
        self._done = threading.Event()
        self.is_success = False
        threading.Thread(target=self._run, name="tfscale-meeting", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Return False if other ranks have not come in time; the attempt then stays open."""
        self._is_wanted = True
        if not self._done.wait(max(timeout_s, 0.0)):
            with self._lock:
                if not self._is_met:
                    self._is_wanted = False
                    return False
            self._done.wait()  # All ranks are in the second round, which takes no time.
        if self._error is not None:
            error = self._error
            raise_own_errors(lambda: _raise(error))
        return True

    def _run(self) -> None:
        try:
            self._least(tf.constant(1))
            with self._lock:
                self._is_met = True
                is_wanted = self._is_wanted
            self.is_success = bool(self._least(tf.constant(int(is_wanted))))
        except Exception as error:  # Told to whoever waits.
            self._error = error
        self._done.set()


def _raise(error: Exception) -> None:
    raise error


def require_all_ranks(meeting: Meeting, timeout_s: float, what: str) -> None:
    """Wait for all ranks that share the optimizer's state.

    Collective: all ranks of the group, on the main thread.

    Args:
        meeting: Where.
        timeout_s: How long.
        what: What this rank is about to do, for the message.

    Raises:
        ExchangeError: Some rank has not come in time, or communication failed.
    """
    if not meeting.wait(timeout_s):
        raise ExchangeError(
            "Where ranks share the optimizer's state, all of them must take part in saving it. "
            f"Received: {what} on rank {runtime.rank()}, and not all other ranks joined within "
            f"{timeout_s:g} s (TFSCALE_SAVE_TIMEOUT_S). Call it on every rank: each path is "
            "written once. Or call model.optimizer.full_state() on every rank, then save on rank 0 "
            "alone. In fit, ModelCheckpoint may be given to rank 0 alone if every rank has a "
            "tfscale callback."
        )
