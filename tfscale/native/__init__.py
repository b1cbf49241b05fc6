"""The shared library as installed: where it is, and whether it fits the installed TensorFlow."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tfscale.errors import ExchangeError
from tfscale.native.build import LIBRARY_NAME, PACKAGE, STAMP_NAME
from tfscale.native.toolchain import installed_tensorflow

__all__ = ["PACKAGE", "library_path", "present_tensorflow", "read_stamp"]

REBUILD = "tfscale build"


def read_stamp(folder: Path = PACKAGE / "_lib") -> dict[str, Any] | None:
    """Return what the library in `folder` was built with, or None where there is no library."""
    stamp = folder / STAMP_NAME
    if not (stamp.exists() and (folder / LIBRARY_NAME).exists()):
        return None
    return dict(json.loads(stamp.read_text()))


def present_tensorflow() -> str | None:
    """Return the version of the TensorFlow in use, or the installed one, or None."""
    module = sys.modules.get("tensorflow")
    return getattr(module, "__version__", None) or installed_tensorflow()


def library_path(folder: Path = PACKAGE / "_lib") -> str:
    """Return the path of the shared library, after checking that it fits.

    Args:
        folder: Where the library and its stamp are.

    Returns:
        A path for `tf.load_op_library`.

    Raises:
        ExchangeError: There is no library, or it was built with another TensorFlow; the text
            names the command that builds it.
    """
    stamp, version = read_stamp(folder), present_tensorflow()
    if stamp is None:
        raise ExchangeError(
            f"More than one rank needs the library {LIBRARY_NAME}. Received: none in {folder}. "
            f"Build it: {REBUILD} (`tfscale doctor` says what is missing)."
        )
    if str(stamp["tensorflow"]).replace("-", "") != str(version).replace("-", ""):
        raise ExchangeError(
            f"{LIBRARY_NAME} must be built with the TensorFlow it is used with. Received: built "
            f"with {stamp['tensorflow']}, installed is {version}. Build it again: {REBUILD}."
        )
    return str(folder / LIBRARY_NAME)
