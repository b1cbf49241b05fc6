"""Compare the step times of a base commit with those of this checkout, side by side in one run.

    python tools/step_times.py --base HEAD~20 [-np 2] [--rounds 12] [--cells "mlp/*"]

For each cell, which is a model and an exchange, both commits start one job. The jobs take turns:
while one runs a block of steps, the ranks of the other wait for a file. The ratio new / base is
paired by round; its median comes with a bootstrap interval of 95 %. Ends with status 1 if the
interval lies above `--limit`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__" and "--rank" not in sys.argv:
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

MODELS = ("mlp", "cnn")
EXCHANGES = ("allreduce", "chunked", "sharded")
WAIT_S, BLOCK_STEPS, WARM_UP_STEPS = 300.0, 200, 30


def build_model(name: str) -> Any:
    """Return a network whose step takes some milliseconds."""
    import keras

    keras.utils.set_random_seed(1)
    layers = keras.layers
    if name == "mlp":
        sizes = [keras.Input((256,)), *(layers.Dense(256, "relu") for _ in range(6))]
        return keras.Sequential([*sizes, layers.Dense(10)])
    blocks: list[Any] = [keras.Input((16, 16, 3))]
    for filters in (16, 32, 64):
        blocks += [layers.Conv2D(filters, 3, padding="same"), layers.ReLU(), layers.MaxPooling2D()]
    return keras.Sequential([*blocks, layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(10)])


def run_rank(cell: str, folder: Path) -> None:
    """Train in one `fit`, a block of steps for each file "go-N"; write the seconds of a block."""
    import keras
    import numpy as np

    import tfscale
    import tfscale.keras as hvd

    hvd.init()
    name, exchange = cell.split("/")
    strategy = {
        "allreduce": tfscale.Allreduce(bucket_mb=0.25),
        "chunked": tfscale.Chunked(first_chunk_layers=2),
        "sharded": tfscale.Sharded(),
    }[exchange]
    model = build_model(name)
    shape = model.input_shape[1:]
    # Long epochs: tf.data may take long to end one.
    x = np.random.default_rng(0).random((64 * 2000, *shape), dtype="float32")
    y: Any = np.arange(len(x)) % 10
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(1e-4), exchange=strategy),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    class Blocks(keras.callbacks.Callback):
        n_steps = -WARM_UP_STEPS
        begin = 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.n_steps >= 0 and self.n_steps % BLOCK_STEPS == 0:
                block = self.n_steps // BLOCK_STEPS
                (folder / f"ready-{block}-{hvd.rank()}").touch()
                deadline = time.monotonic() + WAIT_S
                while not (folder / f"go-{block}").exists():
                    if (folder / "end").exists() or time.monotonic() > deadline:
                        self.model.stop_training = True
                        break
                    time.sleep(0.001)
                self.begin = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.n_steps += 1
            if self.n_steps > 0 and self.n_steps % BLOCK_STEPS == 0:
                seconds = time.perf_counter() - self.begin
                path = folder / f"block-{self.n_steps // BLOCK_STEPS - 1}-{hvd.rank()}"
                path.with_suffix(".part").write_text(json.dumps(seconds))
                path.with_suffix(".part").rename(path)

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Blocks()]
    data = tfscale.data.GlobalBatches(x, y, batch_size=64, seed=1)
    model.fit(data, epochs=100_000, verbose=0, callbacks=callbacks)


class Job:
    """A training of one commit that waits for its turn."""

    def __init__(
        self, tree: Path, cell: str, n_ranks: int, folder: Path, launcher: list[str]
    ) -> None:
        """Start it; returns once all ranks are ready for the first block."""
        folder.mkdir()
        self._folder, self._n_ranks, self._n_blocks = folder, n_ranks, 0
        environment = {**os.environ, "PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment |= {"CUDA_VISIBLE_DEVICES": "-1", "TFSCALE_STALL_WARNING_S": "600"}
        # As `tfscale run` sets them for one core per rank; more threads than cores take turns.
        threads = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
        environment |= {**threads, "TF_NUM_INTEROP_THREADS": "2"}
        command = [*launcher, sys.executable, str(Path(__file__).resolve()), "--rank", cell]
        with (folder / "output").open("w") as output:
            self._process = subprocess.Popen(
                [*command, str(folder)], env=environment, stdout=output, stderr=output, cwd=folder
            )
        self._wait_for("ready-0")

    def _wait_for(self, what: str) -> list[Path]:
        paths = [self._folder / f"{what}-{rank}" for rank in range(self._n_ranks)]
        deadline = time.monotonic() + WAIT_S
        while not all(path.exists() for path in paths):
            if self._process.poll() is not None or time.monotonic() > deadline:
                output = (self._folder / "output").read_text(errors="replace")
                raise SystemExit(f"A job ended early or hangs.\n{output[-3000:]}")
            time.sleep(0.002)
        return paths

    def run_block(self) -> float:
        """Run a block; return the milliseconds of a step on the slowest rank."""
        (self._folder / f"go-{self._n_blocks}").touch()
        paths = self._wait_for(f"block-{self._n_blocks}")
        self._n_blocks += 1
        self._wait_for(f"ready-{self._n_blocks}")
        return 1e3 * max(json.loads(path.read_text()) for path in paths) / BLOCK_STEPS

    def end(self) -> None:
        """End the training in order."""
        (self._folder / "end").touch()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(20)


def measure(
    trees: Sequence[Path], cell: str, n_ranks: int, n_rounds: int, launcher: list[str]
) -> list[list[float]]:
    """Return milliseconds per step, [base, new] of each round; who is first changes by turns."""
    with tempfile.TemporaryDirectory(prefix="tfscale-step-times-") as name, ExitStack() as stack:
        jobs = []
        for number, tree in enumerate(trees):
            jobs.append(Job(tree, cell, n_ranks, Path(name) / str(number), launcher))
            stack.callback(jobs[-1].end)
        rounds = []
        for number in range(n_rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            times = {index: jobs[index].run_block() for index in order}
            if number:  # the first is a warm-up
                rounds.append([times[0], times[1]])
    return rounds


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print a table."""
    parser = argparse.ArgumentParser(description="Step times of a base commit and this checkout.")
    parser.add_argument("--base", required=True, metavar="COMMIT")
    parser.add_argument("-np", type=int, default=2, metavar="N", help="number of ranks")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--limit", type=float, default=1.03, help="ratio new / base")
    parser.add_argument("--output", type=Path, help="write all rounds as JSON")
    arguments = parser.parse_args(argv)

    import replay

    from benchmarks.numbers import paired_ratio

    cells = [f"{model}/{exchange}" for model in MODELS for exchange in EXCHANGES]
    cells = [c for c in cells if any(fnmatchcase(c, p) for p in arguments.cells)]
    results: dict[str, list[list[float]]] = {}
    is_slower = False
    with replay.checkout(arguments.base) as base:
        print("cell             base ms   new ms   new / base, 95 % interval", flush=True)
        for cell in cells:
            launcher = replay.mpiexec(arguments.np)
            rounds = measure((base, ROOT), cell, arguments.np, arguments.rounds, launcher)
            results[cell] = rounds
            base_ms, new_ms = ({n: [row[side]] for n, row in enumerate(rounds)} for side in (0, 1))
            ratio = paired_ratio(new_ms, base_ms, level=0.95)
            assert ratio is not None
            medians = [statistics.median(side) for side in zip(*rounds, strict=True)]
            print(
                f"{cell:16}{medians[0]:8.2f} {medians[1]:8.2f}   "
                f"{ratio.median:.3f}  [{ratio.low:.3f}, {ratio.high:.3f}]",
                flush=True,
            )
            is_slower |= ratio.low > arguments.limit
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1))
    return int(is_slower)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
