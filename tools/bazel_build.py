"""Build the shared library and the C++ tests with Bazel, and run the tests on two ranks.

Writes one small repository each for the MPI and the TensorFlow of this environment: a link to
their headers, and the flags that link them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from build_native import ROOT, import_bare

toolchains = import_bare("tfscale.native.compiler")

BUILD_FILE = """cc_library(
    name = "{name}",
    hdrs = glob(["include/**"]),
    defines = {defines},
    includes = ["include"],
    linkopts = {linkopts},
    visibility = ["//visibility:public"],
)
"""


def write_repository(name: str, compile_flags: Sequence[str], link_flags: Sequence[str]) -> None:
    """Write build/bazel/NAME from a compiler's flags."""
    folder = ROOT / "build" / "bazel" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "WORKSPACE").touch()
    include = next(f for f in compile_flags if f.startswith(("-I", "-isystem")))
    link = folder / "include"
    link.unlink(missing_ok=True)
    link.symlink_to(include.removeprefix("-isystem").removeprefix("-I"))
    defines = [f[2:] for f in compile_flags if f.startswith("-D")]
    text = BUILD_FILE.format(name=name, defines=defines, linkopts=list(link_flags))
    (folder / "BUILD").write_text(text.replace("'", '"'))


def main() -> int:
    """Write the repositories, build, test; return Bazel's exit code."""
    bazel = shutil.which("bazel")
    if bazel is None:
        packages = "bazel-bootstrap bazel-platforms bazel-rules-java bazel-rules-proto"
        print(f"Bazel is not here. Debian: apt-get install {packages}", file=sys.stderr)
        return 1
    toolchain = toolchains.find_toolchain()
    tensorflow = toolchains.find_tensorflow(ROOT / "build" / "native")
    write_repository("mpi", toolchain.compile_flags, toolchain.link_flags)
    write_repository("tensorflow", tensorflow.compile_flags, tensorflow.link_flags)
    # Local: copying TensorFlow's headers into a sandbox for every file takes minutes.
    options = [
        "-c",
        "opt",
        "--force_pic",
        "--spawn_strategy=local",
        "--symlink_prefix=build/bazel/out-",
    ]
    targets = ["//:tfscale", "//custom_ops:all"]
    code = subprocess.run([bazel, "build", *options, *targets], cwd=ROOT).returncode
    has_tests = any(Path(ROOT / "custom_ops" / "test").glob("*_test.cc"))
    if code == 0 and has_tests:
        mpiexec = f"--run_under={toolchains.find_tool('mpiexec')} -n 2"
        options += ["--test_output=errors", "--jobs=1", mpiexec]
        code = subprocess.run([bazel, "test", *options, "//custom_ops:all"], cwd=ROOT).returncode
    subprocess.run([bazel, "shutdown"], cwd=ROOT)
    return code


if __name__ == "__main__":
    sys.exit(main())
