"""The C++ library: loading it, and its C interface (custom_ops/comm/c_api.h)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import tensorflow as tf

from tfscale.comm.native import library_path
from tfscale.config import ExchangeError


class EngineOptions(ctypes.Structure):
    """Mirror of `EngineOptions` in custom_ops/comm/options.h."""

    _fields_ = (
        ("stall_warning_s", ctypes.c_double),
        ("stall_shutdown_s", ctypes.c_double),
        ("max_message_bytes", ctypes.c_int64),
        ("chunk_bytes", ctypes.c_int64),
        ("window_bytes", ctypes.c_int64),
        ("reduce_threads", ctypes.c_int32),
        ("pin_core", ctypes.c_int32),
        ("stack_signal", ctypes.c_int32),
        ("identity", ctypes.c_char_p),
        ("status_path", ctypes.c_char_p),
    )


class HostPlace(ctypes.Structure):
    """Mirror of `HostPlace` in custom_ops/comm/host_place.h."""

    _fields_ = (
        ("local_rank", ctypes.c_int32),
        ("local_size", ctypes.c_int32),
        ("cross_rank", ctypes.c_int32),
        ("cross_size", ctypes.c_int32),
        ("cores", ctypes.c_int32),
    )


class Event(ctypes.Structure):
    """Mirror of `Event` in custom_ops/comm/task.h: times in nanoseconds."""

    _fields_ = (
        ("posted_ns", ctypes.c_int64),
        ("started_ns", ctypes.c_int64),
        ("ended_ns", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("execution", ctypes.c_int64),
        ("plan", ctypes.c_int32),
        ("slot", ctypes.c_int32),
    )


_INT, _TEXT = ctypes.c_int, ctypes.c_char_p
_INT_P = ctypes.POINTER(ctypes.c_int)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "last_error": (_TEXT, ()),
    "start": (_INT, (_INT, ctypes.POINTER(EngineOptions))),
    "stop": (_INT, ()),
    "abort": (None, (_INT,)),
    "rank": (_INT, ()),
    "size": (_INT, ()),
    "thread_level": (_INT, ()),
    "host_place": (_INT, (_INT, ctypes.POINTER(HostPlace))),
    "add_group": (_INT, (_INT_P, _INT)),
    "plan_create": (_INT, (_INT, _TEXT)),
    "plan_add_slot": (_INT, (_INT, _TEXT, _TEXT)),
    "mark": (_INT, (_INT,)),
    "start_incarnation": (_INT, (_INT,)),
    "num_given_up": (ctypes.c_int64, ()),
    "fail": (_INT, (_TEXT,)),
    "num_pending": (ctypes.c_int64, ()),
    "num_failed": (ctypes.c_int64, ()),
    "drain": (None, ()),
    "take_events": (ctypes.c_int64, (ctypes.POINTER(Event), ctypes.c_int64)),
    "clock_ns": (ctypes.c_int64, ()),
}


class Library:
    """The loaded library: `ops` are TensorFlow's wrappers of its ops, `call` its C functions."""

    def __init__(self, path: str) -> None:
        """Load the library.

        Args:
            path: File of the shared library.

        Raises:
            ExchangeError: It cannot be loaded; the text holds the loader's own.
        """
        self._functions = {}
        try:
            self.ops = tf.load_op_library(path)
            functions = ctypes.CDLL(path)
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(functions, f"tfscale_{name}")
                function.restype, function.argtypes = result, arguments
                self._functions[name] = function
        except (OSError, AttributeError, tf.errors.OpError) as error:  # an older one lacks a name
            raise ExchangeError(
                f"The native library must load. Received: {error}. "
                "Run `tfscale doctor` to see what is missing, `tfscale build` to build it again."
            ) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a C function and turn its error into an exception.

        Args:
            name: Name without the prefix `tfscale_`.
            *arguments: As in custom_ops/comm/c_api.h.

        Returns:
            What the function returns.

        Raises:
            ExchangeError: The function reports an error.
        """
        result = self._functions[name](*arguments)
        if isinstance(result, int) and result < 0:
            raise ExchangeError(self._functions["last_error"]().decode())
        return result

    def find_host_place(self, fortran_comm: int) -> HostPlace:
        """Return where this rank is among hosts. Collective, before the engine starts.

        Args:
            fortran_comm: Handle of a communicator, or -1 for all processes.

        Raises:
            ExchangeError: MPI or the system does not tell.
        """
        place = HostPlace()
        self.call("host_place", fortran_comm, place)
        return place


@functools.cache
def load() -> Library:
    """Return the library of this installation, loaded once.

    Raises:
        ExchangeError: It was not built, was built against another TensorFlow, or does not load.
    """
    return Library(library_path())
