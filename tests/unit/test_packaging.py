"""What is built where nothing can be compiled, and what the commands of the Makefile run.

Of the sources: the installed package has no setup.py.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.sources import MODULES, imported_names

ROOT = Path(__file__).parents[2]
PACKED = ("BUILD", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")


def test_a_wheel_is_built_without_compiler_and_mpi(tmp_path):
    """One process trains with it; `tfscale doctor` names what is missing."""
    source = tmp_path / "source"
    for folder in ("custom_ops", "tfscale"):
        ignored = shutil.ignore_patterns("_lib", "__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for name in PACKED:
        shutil.copy(ROOT / name, source)
    environ = {**os.environ, "PATH": str(tmp_path), "CXX": "", "MPICXX": ""}
    words = [sys.executable, "setup.py", "bdist_wheel", "-d", str(tmp_path / "dist")]
    done = subprocess.run(
        words, cwd=source, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "installed without its library" in done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "tfscale/launcher/cli.py" in names and "tfscale/_lib/custom_ops/comm/engine.cc" in names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "-np 2 .venv/bin/python recipes/edsr.py  --data phantom --filters 32 --images 400"),
        (
            ["RECIPE=resnet20", "DATA=fashion_mnist", "NP=3"],
            "-np 3 .venv/bin/python recipes/resnet.py --depth 20 --data fashion_mnist",
        ),
        (["RECIPE=vgg", "ARGS=--epochs 1"], "recipes/vgg.py  --data fashion_mnist --epochs 1"),
    ],
)
def test_make_train_runs_the_recipe(given, expected):
    done = subprocess.run(
        ["make", "-n", "train", *given], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout, done.stdout


# What each room may import: names of tables of pyproject.toml.
NEEDS = {
    "tfscale": ("dependencies",),
    "recipes": ("dependencies", "recipes"),
    "benchmarks": ("dependencies", "recipes", "mpich"),
    "tools": ("dependencies", "recipes", "test", "docs"),
    "tests": ("dependencies", "test", "mpich"),
}
# Imported where they are needed, with a message where they are missing; Horovod is built by hand.
OPTIONAL = {"horovod", "matplotlib", "mpi4py"}
DISTRIBUTIONS = {"PIL": "pillow", "absl": "absl-py"}  # where it is not the name of the import
OURS = {"benchmarks", "recipes", "tests", "tfscale", "tools"}


def declared(table):
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(rf"^{table} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r'"([\w-]+)', listed))


def imported(room):
    """Distributions that a room imports; modules beside its scripts are its own."""
    scripts = [p for p in MODULES if p.relative_to(ROOT).parts[0] in ("recipes", "tools")]
    own = OURS | {p.stem for p in scripts} | {p.parent.name for p in scripts}
    tops = {
        name.split(".")[0]
        for path in MODULES
        if path.relative_to(ROOT).parts[0] == room
        for name in imported_names(path)
    }
    found = tops - own - set(sys.stdlib_module_names)
    return {DISTRIBUTIONS.get(name, name) for name in found}


@pytest.mark.parametrize("room", NEEDS)
def test_imports_are_declared(room):
    known = set().union(*map(declared, NEEDS[room]))
    assert imported(room) - OPTIONAL <= known


def test_the_library_needs_no_more_than_it_imports():
    assert declared("dependencies") == imported("tfscale") - OPTIONAL
    assert declared("recipes") <= imported("recipes")
