"""Where `Checkpoint` stands among the callbacks of a `fit`."""

from __future__ import annotations

from tfscale.callbacks.backup_and_restore import BackupAndRestore
from tfscale.callbacks.backup_state import begun_before
from tfscale.callbacks.base import Callback
from tfscale.comm import objects
from tfscale.config import ConfigError
from tfscale.fit.session import session_for
from tfscale.internals.stack import callbacks_of_fit


def go_first(checkpoint: Callback) -> list[str]:
    """Move a callback in front of all others of the running `fit`, when training begins.

    Keras's callbacks may stand before it in the list. Behind it they set their learning rates
    after the checkpoint's was restored, and at the end of an epoch it sees whether training had
    been stopped before, amid the epoch.

    Returns:
        Names of those that it must not share the list with, or not in this order.
    """
    callbacks = callbacks_of_fit()
    before = callbacks[: callbacks.index(checkpoint)] if checkpoint in callbacks else []
    if before:  # in a new list: the present one is being walked through
        rest = [c for c in callbacks if c is not checkpoint]
        session_for(checkpoint.model).call.callback_list.callbacks = [checkpoint, *rest]
    early = [type(c).__name__ for c in before if isinstance(c, Callback)]
    backups = [type(c).__name__ for c in callbacks if isinstance(c, BackupAndRestore)]
    return early or begun_before(before) or backups


def require_order(early: list[str]) -> None:
    """Raise on all ranks if callbacks stand where they must not on some. Collective.

    Args:
        early: What `go_first` returned.

    Raises:
        ConfigError: It named some.
    """
    every = objects.allgather_object(early, name="order of callbacks")
    wrong: list[str] = next(filter(None, every), [])
    if wrong:
        raise ConfigError(
            "Checkpoint comes before all other callbacks of tfscale and those with a state of "
            "their own, and takes the place of BackupAndRestore. Received: "
            f"{', '.join(wrong)} with it. Put it first."
        )
