"""What is built where nothing can be compiled, and what the commands of the Makefile run.

Of the sources: the installed package has no setup.py.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.helpers.environment import QUIET
from tests.helpers.sources import MODULES, imported_names
from tfscale.native import compiler

ROOT = Path(__file__).parents[2]
SUM = """
import sys
import tfscale

tfscale.init()
total = float(tfscale.allreduce(1.0, op=tfscale.Sum))
sys.stdout.write(f"sum {total}\\n")
"""
TRAIN = """
import logging
import sys

logging.basicConfig(level=logging.INFO)  # one line says what is loaded
import keras
import numpy as np

import tfscale

tfscale.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
data = tfscale.data.GlobalBatches(np.ones((32, 2)), np.ones((32, 1)), batch_size=4)
history = model.fit(data, epochs=4, verbose=0, callbacks=[tfscale.callbacks.Synchronize()])
sys.stdout.write(f"trained, with loss {history.history['loss'][-1]:.2f}\\n")
"""
PACKED = ("BUILD", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory):
    """A wheel from the sdist, built without compiler and MPI, as pip's isolated builds do."""
    folder = tmp_path_factory.mktemp("pure")
    for name in ("custom_ops", "tfscale"):
        ignored = shutil.ignore_patterns("_lib", "__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
    for name in PACKED:
        shutil.copy(ROOT / name, folder / "source")
    setup(folder / "source", "sdist", "-d", str(folder))
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    environ = {**os.environ, "PATH": str(folder), "CXX": "", "MPICXX": ""}
    told = setup(unpacked, "bdist_wheel", "-d", str(folder / "dist"), env=environ)
    assert "its library will be compiled at the first use, not now" in told
    (wheel,) = (folder / "dist").iterdir()
    return wheel


def setup(folder, *words, env=None):
    done = subprocess.run(
        [sys.executable, "setup.py", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_wheel_without_compiler_and_mpi_has_the_sources(pure_wheel):
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(pure_wheel).namelist()
    assert "tfscale/launcher/cli.py" in names and "tfscale/_lib/custom_ops/comm/engine.cc" in names
    assert {"tfscale/py.typed", "tfscale/__init__.pyi"} <= set(names)
    assert not [name for name in names if name.endswith(".so")]


def wheel_with(libraries, pure_wheel, folder):
    """A wheel with libraries that are compiled already, as tools/build_wheel.py makes it."""
    given = {"TFSCALE_LIBRARIES": str(libraries), "TFSCALE_PLATFORM": "manylinux_2_28_x86_64"}
    source = pure_wheel.parents[1] / "source"
    setup(source, "bdist_wheel", "-d", str(folder / "dist"), env={**os.environ, **given})
    (wheel,) = (folder / "dist").iterdir()
    return wheel


def test_a_wheel_for_several_mpis_and_tensorflow_versions_has_a_library_for_each(
    pure_wheel, tmp_path
):
    files = {f"ops-{version}/libtfscale_ops.so" for version in ("2.18", "2.21")}
    files |= {f"engine-libmpi.so.{number}/libtfscale_engine.so" for number in (12, 40)}
    for file in files:
        (tmp_path / "libraries" / file).parent.mkdir(parents=True)
        (tmp_path / "libraries" / file).touch()
    wheel = wheel_with(tmp_path / "libraries", pure_wheel, tmp_path)
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"tfscale/_lib/{file}" for file in files} <= set(names)
    assert "tfscale/_lib/custom_ops/comm/engine.cc" in names


# What a user of mypy writes: TensorFlow and Keras have no types.
USERS_SETTINGS = """
[mypy]
strict = True
[mypy-keras.*,tensorflow.*]
ignore_missing_imports = True
"""


@pytest.mark.timeout(600)
def test_a_typed_script_passes_mypy_against_the_wheel(pure_wheel, tmp_path):
    """Beside NumPy and wrapt, which are seen through a path file."""
    zipfile.ZipFile(pure_wheel).extractall(environment(tmp_path))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mypy.ini").write_text(USERS_SETTINGS)
    script = shutil.copy(Path(__file__).with_name("typed_script.py"), tmp_path / "work")
    python = str(tmp_path / "venv" / "bin" / "python")
    environ = {name: v for name, v in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, script],
        cwd=tmp_path / "work",
        env=environ,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_typed_script_uses_every_public_name():
    page = (ROOT / "docs" / "names.md").read_text()
    script = Path(__file__).with_name("typed_script.py").read_text()
    # A function calls tfscale.callbacks `room`; other names in full at least once.
    prefix, unused = "", []
    for head, name in re.findall(r"^\| `(?:(tfscale\.[\w.]*)|(\w+))` \|", page, re.MULTILINE):
        prefix = head or prefix
        if name and not re.search(rf"\b(?:{re.escape(prefix)}|room\.){name}\b", script):
            unused.append(prefix + name)
    assert unused == []


def environment(folder):
    """Make an environment that sees the packages of this one; return the folder of its own."""
    venv.create(folder / "venv", with_pip=False)
    site = Path(sysconfig.get_path("purelib"))
    own = folder / "venv" / site.relative_to(sys.prefix)
    (own / "seen.pth").write_text(f"{site}\n")
    return own


def install(wheel, folder):
    """Install a wheel into an environment that sees the packages of this one; return its Python."""
    environment(folder)
    python = folder / "venv" / "bin" / "python"
    words = ["install", "-q", "--no-deps", "--no-index", str(wheel)]
    pip = [sys.executable, "-m", "pip", "--python", str(python), *words]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(pip, cwd=folder, env=environ, check=True)
    return python


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_wheel_compiles_its_library_at_the_first_run(pure_wheel, tmp_path):
    """As a new user: TensorFlow and MPI are there, seen through a path file, and a compiler."""
    environ = {**os.environ, **QUIET, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environ.pop("PYTHONPATH", None)
    python = install(pure_wheel, tmp_path)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(SUM)
    told = []
    for _ in range(2):
        done = subprocess.run(
            [python.with_name("tfscale"), "run", "-np", "2", "python", "train.py"],
            cwd=tmp_path / "work",
            env={**environ, "PATH": f"{python.parent}:{environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["sum 2.0"] * 2
        told.append(done.stderr)
    assert "once on this machine: about " in told[0] and "tfscale: compiled in " in told[0]
    assert "compiling the" not in told[1]
    libraries = list((tmp_path / "cache" / "tfscale").glob("*/libtfscale_*.so"))
    assert [path.parent.stat().st_mode & 0o777 for path in libraries] == [0o700] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_wheel_with_libraries_trains_where_no_compiler_is(pure_wheel, tmp_path):
    """With the libraries of this checkout: an engine for its MPI, and ops for its TensorFlow."""
    libraries = tmp_path / "libraries"
    shutil.copytree(
        compiler.PACKAGE / "_lib", libraries, ignore=shutil.ignore_patterns("custom_ops")
    )
    python = install(wheel_with(libraries, pure_wheel, tmp_path), tmp_path)
    (tmp_path / "tools").mkdir()
    for name in ("env", "sh"):
        (tmp_path / "tools" / name).symlink_to(shutil.which(name))
    environ = {**os.environ, **QUIET, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environ |= {"PATH": f"{python.parent}:{tmp_path / 'tools'}"}
    environ.pop("PYTHONPATH", None)
    for name in ("g++", "c++", "mpicxx"):
        assert shutil.which(name, path=environ["PATH"]) is None
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [python.with_name("tfscale"), "run", "-np", "2", "python", "train.py"],
        cwd=tmp_path / "work",
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"trained, with loss \d", done.stdout) == ["trained, with loss 0"] * 2
    assert re.search(rf"{tmp_path}/venv/\S+/_lib/engine-\S+/libtfscale_engine.so", done.stderr)
    assert "compiling the" not in done.stderr and not (tmp_path / "cache" / "tfscale").exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "-np 2 .venv/bin/python recipes/edsr.py  --data phantom --smoke"),
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


def test_make_train_leaves_messages_of_tensorflow_to_tfscale_run(tmp_path):
    """A level of messages in the environment switches off the filter of `tfscale run`."""
    program = tmp_path / "tfscale"
    program.write_text("#!/bin/sh\necho level:$TF_CPP_MIN_LOG_LEVEL.\n")
    program.chmod(0o755)
    environ = {name: v for name, v in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    words = ["make", "-s", "-o", "library", "train", f"BIN={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "level:.\n"


# What each room may import: names of tables of pyproject.toml.
NEEDS = {
    "tfscale": ("dependencies",),
    "recipes": ("dependencies", "recipes"),
    "benchmarks": ("dependencies", "recipes", "mpich"),
    "tools": ("dependencies", "recipes", "test", "docs"),
    "tests": ("dependencies", "test", "mpich"),
}
# Imported where they are needed, with a message where they are missing; Horovod is built by hand.
OPTIONAL = {"horovod", "keras_tuner", "matplotlib", "mlflow", "mpi4py", "ray", "torch", "wandb"}
# Where it is not the name of the import.
DISTRIBUTIONS = {
    **{"PIL": "pillow", "absl": "absl-py", "yaml": "PyYAML"},
    "prometheus_client": "prometheus-client",
}
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
    # Keras's own callback, which README shows, imports TensorBoard.
    assert declared("recipes") - {"tensorboard"} <= imported("recipes")


def test_what_the_readme_shows_is_among_what_it_installs():
    readme = (ROOT / "README.md").read_text()
    (extras,) = re.findall(r"^pip install '\.\[([\w,]+)\]'", readme, re.MULTILINE)
    assert "keras.callbacks.TensorBoard" in readme
    assert "tensorboard" in set().union(*map(declared, extras.split(",")))
