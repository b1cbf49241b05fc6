"""Adds two steps to the build: the C++ sources go with the package, and are compiled if possible.

Compiling needs MPI's compiler wrapper, a C++17 compiler and the TensorFlow that will be used, so it
happens only without build isolation (`pip install --no-build-isolation .`). Otherwise the package
is pure Python, and `tfscale run` compiles the library at its first use. A wheel gets libraries that
are compiled already, in folders of TFSCALE_LIBRARIES: see tools/build_wheel.py.
"""

import functools
import importlib
import os
import shutil
import sys
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
COMPILED = os.environ.get("TFSCALE_LIBRARIES")


def import_bare(name):
    """Import a module of tfscale that needs the standard library only, without the package."""
    for package in ("tfscale", "tfscale.native"):
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(ROOT / package.replace(".", "/"))]
            sys.modules[package] = module
    return importlib.import_module(name)


@functools.cache
def missing():
    """Return what keeps the library from being compiled here, or an empty string."""
    native = import_bare("tfscale.native.compiler")
    try:
        native.find_toolchain()
        native.find_tensorflow(ROOT / "build" / "native")
    except native.BuildError as error:
        return str(error)
    return ""


class BuildNative(build_py):
    """Puts sources and library into the package."""

    def run(self):
        """Copy Python files, then the C++ sources, then compile if everything needed is there."""
        super().run()
        package = ROOT / "tfscale" if self.editable_mode else Path(self.build_lib) / "tfscale"
        if not self.editable_mode:
            shutil.rmtree(package / "_lib", ignore_errors=True)
            for room in ("comm", "tf"):
                target = package / "_lib" / "custom_ops" / room
                shutil.copytree(ROOT / "custom_ops" / room, target)
        if COMPILED:
            shutil.copytree(COMPILED, package / "_lib", dirs_exist_ok=True)
        elif missing():
            text = "tfscale: its library will be compiled at the first use, not now."
            self.warn(f"{text} {missing()}")
        else:
            import_bare("tfscale.native.compiler").build(
                package / "_lib", ROOT / "build" / "native"
            )


class NativeDistribution(Distribution):
    """Knows that a package with the library in it is not pure Python."""

    def has_ext_modules(self):
        """Return whether the library will be in the package."""
        return bool(COMPILED) or not missing()


class NativeWheel(bdist_wheel):
    """The library depends on the platform, not on Python's ABI."""

    def get_tag(self):
        """Return the wheel's tag."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(
    distclass=NativeDistribution,
    cmdclass={"build_py": BuildNative, "bdist_wheel": NativeWheel},
)
