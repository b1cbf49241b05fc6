"""A training that is disturbed again and again ends as if nothing had happened.

    make soak                                  # 30 minutes
    make soak ARGS_SOAK="--minutes 3 --every 8 20"

Every now and then a random rank is killed (SIGKILL), or stopped for some seconds (SIGSTOP), under
`tfscale run --restarts`. At the end weights and the optimizer's state must be equal, bit by bit,
to those of an undisturbed run. Where network namespaces can be made, the ranks run on the
nodes of an emulated cluster, else side by side. The last line printed is a summary as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tools.cluster import commands, control
from tools.cluster.state import script_path

_CLUSTER = "soak"
_TRAINING = Path(__file__).with_name("soak_training.py")
_STEP_S = 0.1
_STEPS_PER_EPOCH = 50
_PAUSE_S = (0.5, 10.0)
# After the disturbed time: training without sleeping, and the start before it.
_REST_S = 600.0
# From SIGTERM, on which ranks save, to SIGKILL.
_END_S = 60.0


@dataclass
class Place:
    """The machine or cluster of the ranks.

    Attributes:
        prefix: Words before `tfscale run`.
        options: Of `tfscale run`.
        environ: Variables in addition.
    """

    prefix: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def make_place(size: int, is_plain: bool) -> Iterator[Place]:
    """Make an emulated cluster with a node per rank, where that is possible and wanted."""
    obstacle = "as asked" if is_plain else control.find_obstacle()
    if obstacle:
        print(f"Side by side, not on an emulated cluster: {obstacle}", flush=True)
        yield Place()
        return
    layout = control.up(_CLUSTER, size)
    try:
        control.set_shape(_CLUSTER, commands.Shape(1e9))
        hosts = ",".join(f"{node.address}:1" for node in layout.nodes)
        variables = commands.run_variables(str(script_path(_CLUSTER)), size, os.cpu_count() or 1)
        yield Place(tuple(commands.inside(layout.bridge_namespace)), ("-H", hosts), dict(variables))
    finally:
        control.down(_CLUSTER)


def start(
    place: Place, options: argparse.Namespace, folder: Path, n_steps: int
) -> subprocess.Popen:
    """Start the training in a folder of its own."""
    folder.mkdir()
    command = [
        *place.prefix,
        sys.executable,
        "-m",
        "tfscale.launcher.cli",
        "run",
        "-np",
        str(options.np),
    ]
    command += [*place.options, "--restarts", "100000", "--", sys.executable, str(_TRAINING)]
    command += [str(folder), str(n_steps), options.exchange]
    environ = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **os.environ}
    return subprocess.Popen(command, env={**environ, **place.environ}, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def training(
    place: Place, options: argparse.Namespace, folder: Path, n_steps: int
) -> Iterator[subprocess.Popen]:
    """Start the training; whatever happens to us, it ends with the block."""
    process = start(place, options, folder, n_steps)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def find_rank(folder: Path, rank: int) -> int | None:
    """Return the process id of a rank that runs now."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / f"rank-{rank}").read_text())
        if _TRAINING.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


@dataclass
class Disturbances:
    """Disturbances of the ranks."""

    kills: int = 0
    pauses: int = 0

    def disturb(self, choice: random.Random, folder: Path, size: int) -> None:
        """Kill a random rank, or stop it for some seconds; nothing where it does not run."""
        rank = choice.randrange(size)
        is_kill = choice.random() < 0.6
        pause_s = choice.uniform(*_PAUSE_S)
        pid = find_rank(folder, rank)
        with contextlib.suppress(ProcessLookupError):
            if pid is not None and is_kill:
                print(f"soak: rank {rank} is killed", flush=True)
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
            elif pid is not None:
                print(f"soak: rank {rank} is stopped for {pause_s:.1f} s", flush=True)
                os.kill(pid, signal.SIGSTOP)
                self.pauses += 1
                time.sleep(pause_s)
                os.kill(pid, signal.SIGCONT)


def run_disturbed(
    place: Place, options: argparse.Namespace, folder: Path, n_steps: int
) -> Disturbances:
    """Run the training to its end, disturbing it for the minutes asked for.

    Raises:
        SystemExit: It failed, or did not end.
    """
    choice, done = random.Random(options.seed), Disturbances()
    deadline = time.monotonic() + 60 * options.minutes
    with training(place, options, folder, n_steps) as process:
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(choice.uniform(*options.every))
            done.disturb(choice, folder, options.np)
        finish(process, folder, "disturbed")
    return done


def run_undisturbed(place: Place, options: argparse.Namespace, folder: Path, n_steps: int) -> None:
    """Run the same training without sleeping or disturbance.

    Raises:
        SystemExit: It failed, or did not end.
    """
    with training(place, options, folder, n_steps) as process:
        finish(process, folder, "undisturbed")


def finish(process: subprocess.Popen, folder: Path, kind: str) -> None:
    """Let a training continue without sleeping, and wait for its end.

    Raises:
        SystemExit: It failed, or did not end.
    """
    (folder / "hurry").touch()
    try:
        if process.wait(_REST_S) != 0:
            raise SystemExit(f"The {kind} training failed with exit code {process.returncode}.")
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"The {kind} training did not end.") from error


def differences(one: Path, other: Path) -> list[str]:
    """Return the names of arrays of two .npz files that are not equal bit by bit."""
    with np.load(one) as a, np.load(other) as b:
        names = sorted({*a.files, *b.files})
        return [
            name
            for name in names
            if name not in a or name not in b or a[name].tobytes() != b[name].tobytes()
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; return 0 if both runs ended alike."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of disturbance")
    parser.add_argument("--every", type=float, nargs=2, default=(20.0, 60.0), metavar="S")
    parser.add_argument("--seed", type=int, default=None, help="of the disturbances; random")
    parser.add_argument("-np", type=int, default=2, choices=(2, 3, 4))
    known = ("allreduce", "allreduce-int8", "sharded", "sharded-int8")
    parser.add_argument("--exchange", default="allreduce", choices=known)
    parser.add_argument("--plain", action="store_true", help="not on an emulated cluster")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.randrange(2**32)
    print(f"soak: the same disturbances again: --seed {options.seed}", flush=True)
    # Sleeping alone takes half of the disturbed time; starting again takes much of the rest.
    n_epochs = max(2, round(options.minutes * 60 / 2 / _STEP_S / _STEPS_PER_EPOCH))
    n_steps = n_epochs * _STEPS_PER_EPOCH
    with (
        tempfile.TemporaryDirectory(prefix="tfscale-soak-") as name,
        make_place(options.np, options.plain) as place,
    ):
        folder = Path(name)
        run_undisturbed(place, options, folder / "undisturbed", n_steps)
        done = run_disturbed(place, options, folder / "disturbed", n_steps)
        different = differences(folder / "undisturbed/final.npz", folder / "disturbed/final.npz")
    summary = {"seed": options.seed, "steps": n_steps, "kills": done.kills, "pauses": done.pauses}
    print(json.dumps({**summary, "is_equal": not different, "different": different}))
    return 1 if different or not (done.kills or done.pauses) else 0


if __name__ == "__main__":
    sys.exit(main())
