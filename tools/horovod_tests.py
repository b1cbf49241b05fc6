"""Run Horovod's own TensorFlow and Keras tests on tfscale, with only their imports changed.

    python tools/horovod_tests.py PATH_TO_HOROVOD_SOURCES [-np 2] [--only PATTERN] [--output FILE]

Takes the sources of Horovod 0.28.1, which are not part of this project. Copies three test files to
a temporary folder, changes their imports and what Keras 3 has renamed, and runs each test on all
ranks. Tests that Horovod runs twice, eagerly and in a session of TensorFlow 1, are two
tests here: the second has the suffix `_session`. Each file, and the test after a failure, gets
fresh processes. Ends with status 1 if a test fails that `expected` does not name, or one passes
that it names.

Needs `pip install parameterized packaging` besides the tests' own packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "0.28.1"
BASE = "test/parallel/base_test_tensorflow.py"
FILES = (
    "test/parallel/test_tensorflow.py",
    "test/parallel/test_tensorflow_process_sets.py",
    "test/parallel/test_tensorflow2_keras.py",
)
PACKAGES = ("parameterized", "packaging", "pytest")
_OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "--rootdir=.")
START_S, TEST_S, OTHERS_S, POLL_S = 90.0, 120.0, 5.0, 0.05

# (pattern, replacement): imports, and the one private helper of Horovod that the tests call.
IMPORTS = (
    (r"^import horovod\.tensorflow\.keras as (\w+)", r"import tfscale.keras as \1"),
    (r"^import horovod\.keras as (\w+)", r"import tfscale.keras as \1"),
    (r"^import horovod\.tensorflow as (\w+)", r"import tfscale as \1"),
    (
        r"^from horovod\.tensorflow\.util import _executing_eagerly",
        "from tensorflow import executing_eagerly as _executing_eagerly",
    ),
    (
        r"^from horovod\.common\.util import is_version_greater_equal_than",
        "from helpers_of_tests import is_version_greater_equal_than",
    ),
    (
        r"^from horovod\.runner\.common\.util\.env import get_env_rank_and_size",
        "from helpers_of_tests import rank_and_size as get_env_rank_and_size",
    ),
    (
        r"^from common import mpi_env_rank_and_size, skip_or_fail_gpu_test",
        "from helpers_of_tests import rank_and_size as mpi_env_rank_and_size\n"
        "from helpers_of_tests import skip_or_fail_gpu_test",
    ),
    (r"hvd\.(util\.)?_executing_eagerly", "_executing_eagerly"),
    (
        r"^from tensorflow\.python\.framework\.test_util import run_all_in",
        "from helpers_of_tests import run_all_in",
    ),
)
KERAS_3 = (
    (r"experimental_run_tf_function=\w+,?", ""),
    (r"optimizer\.lr\b", "optimizer.learning_rate"),
    (r"\bvar\.ref\(\)", "id(var)"),
    (r", fused=False", ""),
    (r"(?:tf\.)?keras\.(?:losses|metrics)\.(mean_squared_error|categorical_accuracy)", r"'\1'"),
    (r"\blr=", "learning_rate="),
    (r"keras\.layers\.ThresholdedReLU\(0\.5\)", "keras.layers.ReLU(threshold=0.5)"),
)
HELPERS = '''
"""What Horovod's tests take from Horovod besides its public functions."""
import os

from packaging import version
from tensorflow.python.eager import context

from tfscale.comm.process import discover


def is_version_greater_equal_than(one, other):
    return version.parse(one) >= version.parse(other)


def rank_and_size():
    launch = discover(os.environ)
    return launch.rank, launch.size


def skip_or_fail_gpu_test(test, message):
    test.skipTest(message)


def run_all_in_graph_and_eager_modes(case):
    for name, test in list(vars(case).items()):
        if name.startswith("test_") and name != "test_session":
            setattr(case, name + "_session", _in_session(test))


def _in_session(test):
    def run(self):
        with context.graph_mode(), self.test_session():
            test(self)

    return run
'''

# Reason -> the tests that fail for it. Everything else must pass.
_REASONS = {
    "TensorFlow 1: an op's error in a session is `InternalError` and ends communication": """
        test_horovod_allgather_error_session test_horovod_allgather_type_error_session
        test_horovod_allreduce_error_session test_horovod_allreduce_type_error_session
        test_horovod_alltoall_rank_error_session test_horovod_alltoall_type_error_session
        test_horovod_broadcast_error_session test_horovod_broadcast_rank_error_session
        test_horovod_broadcast_type_error_session test_horovod_reducescatter_error_session
        test_horovod_reducescatter_type_error_session""",
    "TensorFlow 1: objects are sent eagerly only": """
        test_allgather_object_session test_broadcast_object_session""",
    "TensorFlow 1: a session leaves out a collective whose result is not used on this rank": """
        test_horovod_broadcast_grad_cpu_session""",
    "TensorFlow 1: there are no global variables; pass `model=`, else `ConfigError`": """
        test_horovod_broadcast_graph_mode_session test_horovod_broadcast_eager_mode_error""",
    "no `elastic` states": "test_elastic_state",
    "asks for Adasum; other ops of sparse tensors are `ConfigError`, not `NotImplementedError`": """
        test_horovod_allreduce_indexed_slices_op_error
        test_horovod_allreduce_indexed_slices_op_error_session
        test_horovod_grouped_allreduce_indexed_slices_op_error
        test_horovod_grouped_allreduce_indexed_slices_op_error_session
        test_horovod_grouped_allreduce_mixed_indexed_slices_op_error
        test_horovod_grouped_allreduce_mixed_indexed_slices_op_error_session""",
    "sparse tensors may have factors": """
        test_horovod_allreduce_indexed_slices_prescale_postscale_error
        test_horovod_allreduce_indexed_slices_prescale_postscale_error_session""",
    "private: `_compute_gradients` or `_agg_helper` of the optimizer": """
        test_grad_aggregation_with_inf_grad test_gradient_aggregation_0
        test_gradient_aggregation_1 test_gradient_aggregation_with_local_vars_0
        test_gradient_aggregation_with_local_vars_1 test_partial_distributed_optimizer
        test_sparse_as_dense_with_grad_aggregation""",
    "Keras 2: legacy optimizers": "test_legacy_optimizer",
    "TensorFlow 1: its optimizers cannot be wrapped": """
        test_legacy_DistributedOptimizer_process_sets_session""",
    "TensorFlow 1: variables are broadcast at once, and variables of Keras 3 are not fetched": """
        test_broadcast_variables_process_sets_session test_horovod_syncbn_cpu_session""",
    "sets `process_set_id` by hand and expects `ValueError`: it is `InvalidArgumentError`": """
        test_horovod_allreduce_process_set_id_error
        test_horovod_allreduce_process_set_id_error_session""",
    "compares a float16 error of 0 with 1e-8, which NumPy 2 rounds to 0: Horovod fails as well": """
        test_horovod_reducescatter_grad_cpu_process_sets""",
}
EXPECTED = {test: reason for reason, tests in _REASONS.items() for test in tests.split()}
# On 3 ranks, besides.
_REASONS_OF_THREE = {
    "3 ranks, exact equality of floats: Horovod itself misses it, too": """
        test_horovod_allreduce_average_cpu test_horovod_allreduce_average_cpu_session
        test_horovod_allreduce_product_cpu test_horovod_allreduce_product_cpu_session
        test_horovod_allreduce_cpu_prescale_session test_horovod_grouped_allreduce_average_cpu
        test_horovod_grouped_allreduce_average_cpu_session
        test_horovod_grouped_allreduce_product_cpu
        test_horovod_grouped_allreduce_product_cpu_session
        test_horovod_grouped_allreduce_mixed_indexed_slices_average_cpu
        test_horovod_grouped_allreduce_mixed_indexed_slices_average_cpu_session
        test_horovod_reducescatter_cpu_prescale_session
        test_horovod_grouped_reducescatter_cpu_prescale_session""",
    "3 ranks, exact equality of float16: sums are kept in float32 and rounded once, after the "
    "factor": """
        test_horovod_allreduce_cpu_postscale test_horovod_allreduce_cpu_postscale_session
        test_horovod_reducescatter_cpu_postscale test_horovod_reducescatter_cpu_postscale_session
        test_horovod_grouped_reducescatter_cpu_postscale
        test_horovod_grouped_reducescatter_cpu_postscale_session""",
    "TensorFlow 1: objects are sent eagerly only": """
        test_allgather_object_process_sets_session test_broadcast_object_process_sets_session""",
    "TensorFlow 1: a session leaves out a collective whose result is not used on this rank": """
        test_horovod_broadcast_grad_cpu_process_sets_session""",
}


def expected(n_ranks: int) -> dict[str, str]:
    """Return the tests that fail on a number of ranks, and why."""
    more = _REASONS_OF_THREE if n_ranks == 3 else {}
    return EXPECTED | {test: why for why, tests in more.items() for test in tests.split()}


@dataclass(frozen=True)
class Result:
    """The outcome of one test: of the first rank that did not pass, else of rank 0.

    Attributes:
        test: "file.py::Class::function".
        status: "passed", "skipped", "failed", "hang" or "lost" (the process ended in between).
        text: The last lines of the error, or why it was skipped.
    """

    test: str
    status: str
    text: str = ""


def adapt(source: str) -> str:
    """Return the source of a test file with the imports of tfscale and the names of Keras 3."""
    for pattern, replacement in IMPORTS + KERAS_3:
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    return source


def prepare(horovod: Path, folder: Path) -> list[str]:
    """Write the changed files to a folder; return the names of their tests in order."""
    text = (horovod / "horovod" / "__init__.py").read_text()
    if f"'{VERSION}'" not in text:
        raise SystemExit(f"These must be the sources of Horovod {VERSION}. Received: {horovod}")
    (folder / "helpers_of_tests.py").write_text(HELPERS)
    for name in (BASE, *FILES):
        path = folder / Path(name).name
        path.write_text(adapt((horovod / name).read_text()))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *_OPTIONS]
    found = subprocess.run(
        [*command, *(Path(name).name for name in FILES)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
        capture_output=True,
        text=True,
    )
    tests = [line for line in found.stdout.splitlines() if "::test_" in line]
    if found.returncode or not tests:
        raise SystemExit(f"The tests cannot be read.\n{found.stdout}{found.stderr}")
    return [t for t in tests if not t.endswith("::test_session")]  # TensorFlow's, not a test


class Recorder:
    """A plugin of pytest that writes each outcome at once."""

    def __init__(self, path: Path) -> None:
        """Write to a file."""
        self._path = path
        self._reports: dict[str, Result] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst outcome of set-up, call and tear-down."""
        test = report.nodeid
        if report.outcome != "passed" or report.when == "call":
            text = report.longrepr[2] if report.skipped else str(report.longrepr or "")
            before = self._reports.get(test)
            if before is None or before.status == "passed":
                self._reports[test] = Result(test, report.outcome, text)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the outcome of a test."""
        result = self._reports.get(nodeid, Result(nodeid, "passed"))
        with self._path.open("a") as file:
            file.write(json.dumps([result.test, result.status, result.text[-2000:]]) + "\n")


def run_rank(folder: Path) -> int:
    """Run the listed tests in this process, which is one of several ranks."""
    import pytest

    from tfscale.comm.process import discover

    launch = discover(os.environ)
    assert launch is not None
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    tests = json.loads((folder / "tests.json").read_text())
    recorder = Recorder(folder / f"results.{launch.rank}.jsonl")
    pytest.main(["-q", *_OPTIONS, *tests], plugins=[recorder])
    return 0


def run_job(tests: list[str], n_ranks: int, folder: Path) -> list[Result]:
    """Run tests until one fails on some rank; return the results, at least one."""
    for path in folder.glob("results.*"):
        path.unlink()
    (folder / "tests.json").write_text(json.dumps(tests))
    command = [sys.executable, "-m", "tfscale.launcher.cli", "run", "-np", str(n_ranks)]
    command += [sys.executable, str(Path(__file__).resolve()), "--rank", str(folder)]
    # A rank that fails alone must not keep the others for minutes.
    environment = {"TFSCALE_STALL_SHUTDOWN_S": "60", "CUDA_VISIBLE_DEVICES": "-1"} | dict(
        os.environ
    )
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        return _watch(process, tests, n_ranks, folder)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _watch(process: subprocess.Popen, tests: list[str], n_ranks: int, folder: Path) -> list[Result]:
    results: list[Result] = []
    since, limit_s = time.monotonic(), START_S
    while len(results) < len(tests):
        is_over = process.poll() is not None
        rows = [_read(folder / f"results.{rank}.jsonl") for rank in range(n_ranks)]
        index = len(results)
        ended = [row[index] for row in rows if len(row) > index]
        bad = next((r for r in ended if r.status not in ("passed", "skipped")), None)
        if len(ended) == n_ranks and bad is None:
            results.append(ended[0])
            since, limit_s = time.monotonic(), TEST_S
            continue
        waited_s = time.monotonic() - since
        if bad is not None and (len(ended) == n_ranks or waited_s > limit_s or is_over):
            return [*results, bad]
        if bad is not None:
            limit_s = min(limit_s, waited_s + OTHERS_S)
        elif is_over or waited_s > limit_s:
            last = "\n".join((folder / "output").read_text(errors="replace").splitlines()[-15:])
            return [*results, Result(tests[index], "lost" if is_over else "hang", last)]
        time.sleep(POLL_S)
    return results


def _read(path: Path) -> list[Result]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Result(*json.loads(line)) for line in lines if line.endswith("\n")]


def table(results: list[Result], known: dict[str, str]) -> str:
    """Return Markdown tables: counts by file, and the tests that fail by reason."""
    lines = ["| File | Passed | Skipped | Failed |", "|---|---|---|---|"]
    for file in dict.fromkeys(r.test.partition("::")[0] for r in results):
        counts = Counter(r.status for r in results if r.test.startswith(file))
        passed, skipped = counts.pop("passed", 0), counts.pop("skipped", 0)
        lines.append(f"| `{file}` | {passed} | {skipped} | {counts.total()} |")
    bad = [r.test.rpartition("::")[2] for r in results if r.status not in ("passed", "skipped")]
    lines += ["", "| Reason | Tests that fail |", "|---|---|"] if bad else []
    for reason in dict.fromkeys(known.get(name, "**not expected**") for name in bad):
        names = [n for n in bad if known.get(n, "**not expected**") == reason]
        lines.append(f"| {reason} | {', '.join(f'`{n}`' for n in names)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the tests and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("horovod", type=Path, help=f"folder of the sources of Horovod {VERSION}")
    parser.add_argument("-np", type=int, default=2, metavar="N", help="number of ranks")
    parser.add_argument("--only", default="", metavar="REGEX", help="tests whose name matches")
    parser.add_argument("--output", type=Path, help="write the table to this file, too")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rank:
        return run_rank(arguments.horovod)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"these packages are missing: pip install {' '.join(missing)}")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="tfscale-horovod-tests-") as name:
        folder = Path(name)
        tests = prepare(arguments.horovod, folder)
        tests = [t for t in tests if re.search(arguments.only, t)]
        while len(results) < len(tests):
            rest = tests[len(results) :]
            file = rest[0].partition("::")[0]
            chosen = [t for t in rest if t.startswith(file)]
            for result in run_job(chosen, arguments.np, folder):
                results.append(result)
                is_good = result.status in ("passed", "skipped")
                last = "" if is_good else "\n" + result.text
                print(
                    f"{len(results)}/{len(tests)} {result.status} {result.test}{last}", flush=True
                )
    known = expected(arguments.np)
    text = table(results, known)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
    failed = {r.test.rpartition("::")[2] for r in results if r.status not in ("passed", "skipped")}
    run = {r.test.rpartition("::")[2] for r in results}
    return int(bool((failed ^ known.keys()) & run))


if __name__ == "__main__":
    sys.exit(main())
