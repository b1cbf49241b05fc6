"""Variables with a pending all-gather; reads wait for it.

A step of a sharded exchange posts gathers and ends without waiting for them
(`Backend.post_gather`). The class of each parameter is replaced by a subclass, `Awaited`, which
waits before every read and write: eagerly, or by an op in the graph that is being traced.
TensorFlow orders that op by the variable's handle, so layer 1 can begin while layer 2 waits for its
parameters.

Checked with Keras 3.10 and 3.15: `Variable._direct_assign`, `_restore_from_tensors`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Backend
from tfscale.comm.eager import raise_own_errors
from tfscale.config import ExchangeError
from tfscale.internals.keras import raw_variable, set_class, wrap_once
from tfscale.internals.trace import current_graph, drop_traces, is_compiled_by_xla, is_function

OnAssign = Callable[[Any, Any, Any], None]

_FUTURE = "_tfscale_future"


@dataclass(frozen=True)
class _Future:
    backend: Backend  # gathers the awaited variable
    on_assign: OnAssign | None  # follows an assignment


class Awaited:
    """Mixin for the class of a variable whose gather may be pending."""

    @property
    def value(self: Any) -> Any:
        """The variable or, if Keras casts or replaces it, a tensor; waits for the gather."""
        _wait([self])
        return _base(self).value

    @property
    def handle(self: Any) -> tf.Tensor:
        """The resource handle; waits for the gather."""
        _wait([self])
        return raw_variable(self).handle

    def _direct_assign(self: Any, value: Any) -> None:
        on_assign = assignment_hook(self)
        _wait([self], is_write=True)
        before = raw_variable(self).read_value()
        _base(self)._direct_assign(value)
        if on_assign is not None:
            on_assign(self, value, before)

    def _restore_from_tensors(self: Any, restored_tensors: Any) -> Any:
        on_assign = assignment_hook(self)
        _wait([self], is_write=True)
        restored = _base(self)._restore_from_tensors(restored_tensors)
        if on_assign is not None:
            on_assign(self, tf.convert_to_tensor(raw_variable(self)), None)
        return restored

    def __repr__(self: Any) -> str:
        """Show the value, unless its gather failed."""
        try:
            _wait([self])
        except ExchangeError as error:
            return f"<Variable path={self.path}, shape={self.shape}, error={error}>"
        return _base(self).__repr__()

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle and copy as a variable of the original class, with the gathered value."""
        _wait([self])
        state = {k: v for k, v in vars(self).items() if k != _FUTURE}
        return _new_instance, (_plain_class(self),), state


def make_futures(variables: Sequence[Any], on_assign: OnAssign | None = None) -> None:
    """Let every read of some Keras variables wait for pending gathers.

    Functions that were traced before do not wait; `attach` lets them be traced again. `on_assign`
    is called with a variable, its new value, and that before or None, after each assignment through
    Keras (`assign`, `set_weights`, `load_weights`, a restored checkpoint), eager or traced; it
    replaces an earlier one.
    """
    future = _Future(runtime.backend(), on_assign)
    for variable in variables:
        object.__setattr__(variable, _FUTURE, future)
        if not isinstance(variable, Awaited):
            set_class(variable, _awaited_class(variable.__class__))


def assignment_hook(variable: Any) -> OnAssign | None:
    """Return the call that follows assignments to a variable; None if it is not a future."""
    return getattr(variable, _FUTURE).on_assign if isinstance(variable, Awaited) else None


def release(variables: Sequence[Any]) -> None:
    """Wait for pending gathers, and make futures ordinary again, also if a gather failed."""
    awaited = [v for v in variables if isinstance(v, Awaited)]
    try:
        drain(awaited)
    finally:
        for variable in awaited:
            object.__delattr__(variable, _FUTURE)
            set_class(variable, _plain_class(variable))


def drain(variables: Sequence[Any]) -> None:
    """Wait for the pending gathers of some variables; may be called from any thread."""
    awaited = [v for v in variables if isinstance(v, Awaited)]
    with tf.init_scope():
        _wait(awaited)


@contextlib.contextmanager
def plain(variables: Sequence[Any]) -> Iterator[None]:
    """Make variables ordinary within a block, which must neither train nor assign.

    Functions that are traced in the block do not wait and have no ops of tfscale, so that saved
    functions (export, `tf.saved_model.save`, `tf.lite`) load where tfscale is not installed.
    """
    awaited: list[Any] = [v for v in variables if isinstance(v, Awaited)]
    drain(awaited)
    for variable in awaited:
        set_class(variable, _plain_class(variable))
    try:
        yield
    finally:
        for variable in awaited:
            set_class(variable, _awaited_class(variable.__class__))


def attach(
    model: keras.Model, variables: Sequence[Any], on_assign: OnAssign | None = None
) -> list[str]:
    """Make variables futures, and have the functions of a built model wait for them.

    Every tf.function that was traced with one of the variables is traced again at its next call;
    `model.export` runs under `plain`. Returns the names of these functions. Concrete functions that
    a user keeps cannot be traced again: they still read without waiting.
    """
    make_futures(variables, on_assign)

    def plainly(export: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(export)
        def export_plain(*args: Any, **kwargs: Any) -> Any:
            with plain(model.variables):
                return export(*args, **kwargs)

        return export_plain

    wrap_once(model, "export", plainly)
    return drop_traces([raw_variable(v) for v in variables])


def _wait(variables: Sequence[Any], is_write: bool = False) -> None:
    """Wait for pending gathers, now or when the function that is being traced runs.

    With `is_write` the variables are about to be overwritten, so errors of gathers are ignored.
    """

    def wait() -> None:
        handles_by_backend: dict[Backend, list[tf.Tensor]] = {}
        for v in variables:
            handles_by_backend.setdefault(getattr(v, _FUTURE).backend, []).append(
                raw_variable(v).handle
            )
        for backend, handles in handles_by_backend.items():
            backend.await_variables(handles, is_write)

    if not variables:
        return
    graph = current_graph()
    if graph is None:
        raise_own_errors(wait)
        return
    if not is_function(graph):
        return
    if is_compiled_by_xla(graph):
        raise ExchangeError(
            "jit_compile must be False to wait for parameters. Received: jit_compile=True for "
            f"{graph.name}, which reads {variables[0].path}. Compile with jit_compile=False, or "
            "call and trace it within tfscale.optimizer.futures.plain(model.variables)."
        )
    wait()  # at each read, not once per graph: a called function may have posted a gather


def _base(variable: Any) -> Any:
    """Return an awaited variable as one of its original class: `super()` for mypy."""
    return super(Awaited, variable)


@functools.cache
def _awaited_class(cls: Any) -> type:
    return type(f"Awaited{cls.__name__}", (Awaited, cls), {"__module__": __name__})


def _new_instance(cls: Any) -> Any:
    return cls.__new__(cls)


def _plain_class(variable: Any) -> type:
    return variable.__class__.__mro__[2]
