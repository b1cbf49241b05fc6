"""Build the shared libraries in a checkout without importing the package or TensorFlow here."""

import importlib
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def import_bare(name: str) -> types.ModuleType:
    """Import a submodule of tfscale without running the package's `__init__`.

    Args:
        name: A module that needs the standard library only, such as "tfscale.native.compiler".
    """
    for package in ("tfscale", "tfscale.native"):
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(ROOT / package.replace(".", "/"))]
            sys.modules[package] = module
    return importlib.import_module(name)


if __name__ == "__main__":
    objects = ["--objects", str(ROOT / "build" / "native")]
    sys.exit(import_bare("tfscale.native.cache").main([*objects, *sys.argv[1:]]))
