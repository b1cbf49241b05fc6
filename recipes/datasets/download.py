"""Let Keras look into its cache, or download, once per machine."""

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any


def by_keras(load_data: Callable[[], Any], data_dir: str, missing: str) -> Any:
    """Call one of Keras's `load_data`, which download unless their files are in Keras's cache.

    Several processes may call it at once: the others of a machine wait for the first.

    Args:
        load_data: Such as `keras.datasets.mnist.load_data`.
        data_dir: Folder for a lock; made if it is missing.
        missing: What to say if the data set cannot be had: what was looked for, what to do.

    Raises:
        FileNotFoundError: The download fails.
    """
    folder = Path(data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".download-lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return load_data()
        except Exception as error:  # Keras raises a bare Exception where a download fails.
            raise FileNotFoundError(f"{missing} Download: {error}.") from error
