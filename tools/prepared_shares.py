"""Measure `--decode rows` against `--decode batches`: an epoch of pictures from files on 2 ranks.

python tools/prepared_shares.py --pictures 2000 --rounds 3

The script that is measured is the lower half of this file, as `tfscale run --distribute` runs it
unchanged: `keras.utils.image_dataset_from_directory` and a small network, so that decoding
dominates. Each way runs by turns. The time of an epoch is that of the slowest rank; CPU seconds are
those of all threads of all ranks, which other programs on the machine hardly change.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

WAYS = ("batches", "rows")
_N_DISTINCT = 50


def make_pictures(folder: Path, n_pictures: int, side: int) -> None:
    """Write JPEG files of smooth noise in two classes; every 50th is the same."""
    import numpy as np
    import tensorflow as tf

    rng, encoded = np.random.default_rng(0), []
    for _ in range(min(n_pictures, _N_DISTINCT)):
        coarse = rng.uniform(0, 255, (1, side // 8, side // 8, 3))
        picture = tf.clip_by_value(tf.image.resize(coarse, (side, side), "bicubic")[0], 0, 255)
        encoded.append(tf.io.encode_jpeg(tf.cast(picture, tf.uint8)).numpy())
    for name in "ab":
        (folder / name).mkdir()
    for i in range(n_pictures):
        (folder / "ab"[i % 2] / f"{i:05d}.jpg").write_bytes(encoded[i % _N_DISTINCT])


def run(pictures: Path, way: str, n_ranks: int, n_epochs: int) -> tuple[float, float]:
    """Return the median seconds of an epoch, and its CPU seconds of all ranks."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "tfscale.launcher.cli", "run", "--quiet", "--distribute"]
        command += ["--decode", way, "-np", str(n_ranks), sys.executable, __file__, "--train"]
        subprocess.run([*command, str(pictures), out, str(n_epochs)], check=True)
        by_rank = [json.loads(path.read_text()) for path in Path(out).iterdir()]
    # The first epoch traces, and verifies its first step.
    wall = [max(rank["wall"][i] for rank in by_rank) for i in range(1, n_epochs)]
    cpu = [sum(rank["cpu"][i] for rank in by_rank) for i in range(1, n_epochs)]
    return median(wall), median(cpu)


def train(pictures: str, out: str, n_epochs: str) -> None:
    """Train on pictures, as a script of one process does; write the times of epochs."""
    import keras

    class Times(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.marks: list[tuple[float, float]] = []

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.marks.append((time.perf_counter(), time.process_time()))

        def on_train_end(self, logs: object = None) -> None:
            self.on_epoch_begin(0)

    data = keras.utils.image_dataset_from_directory(pictures, image_size=(64, 64), seed=1)
    layers = keras.layers
    model = keras.Sequential([layers.Rescaling(1 / 255), layers.Conv2D(4, 3, 4), layers.Flatten()])
    model.add(layers.Dense(1, "sigmoid"))
    model.compile("adam", "binary_crossentropy")
    times = Times()
    model.fit(data, epochs=int(n_epochs), callbacks=[times], verbose=0)
    spans = zip(times.marks, times.marks[1:], strict=False)
    wall, cpu = zip(*((b[0] - a[0], b[1] - a[1]) for a, b in spans), strict=True)
    Path(out, str(os.getpid())).write_text(json.dumps({"wall": wall, "cpu": cpu}))


def main() -> None:
    """Run both ways by turns, and print each and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--side", type=int, default=1024, help="of a picture, in pixels")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_pictures(Path(folder), args.pictures, args.side)
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                found[way].append(run(Path(folder), way, args.ranks, args.epochs))
                wall, cpu = found[way][-1]
                print(f"{way:8} {wall:7.2f} s an epoch, {cpu:7.2f} CPU s", flush=True)
    for i, name in enumerate(("wall time", "CPU seconds")):
        ratios = [a[i] / b[i] for a, b in zip(*found.values(), strict=True)]
        print(f"{name}: batches / rows = {median(ratios):.2f} (rounds: {sorted(ratios)})")


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1:2] == ["--train"] else main()
