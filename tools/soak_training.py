"""The job that tools/soak.py disturbs: a small training with a checkpoint every few steps.

    python tools/soak_training.py FOLDER STEPS EXCHANGE

Each rank leaves its process id in FOLDER/rank-<rank>; rank 0 leaves final weights and the state of
the optimizer in FOLDER/final.npz. Until FOLDER/hurry exists each step sleeps, so that there is
time to disturb it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale import Compression
from tfscale.callbacks import BroadcastGlobalVariablesCallback, Checkpoint
from tfscale.comm.process import discover
from tfscale.data import GlobalBatches
from tfscale.files import write_atomically

STEPS_PER_EPOCH = 50
STEP_S = 0.1
_BATCH_SIZE = 12  # 2, 3 or 4 ranks
_EXCHANGES = {"allreduce": tfscale.Allreduce, "sharded": tfscale.Sharded}


class Pace(keras.callbacks.Callback):
    """Sleeps in each step, until it is told to hurry."""

    def __init__(self, folder: Path) -> None:
        """Look into a folder."""
        super().__init__()
        self._hurry = folder / "hurry"

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Sleep."""
        if not self._hurry.exists():
            time.sleep(STEP_S)


def make_model() -> keras.Model:
    """Return a model with random numbers of its own."""
    return keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(64, activation="relu"),  # large enough to be compressed
            keras.layers.Dropout(0.2, seed=3),
            keras.layers.Dense(1),
        ]
    )


def main(folder: Path, n_steps: int, exchange: str) -> None:
    """Train to the end."""
    launch = discover(os.environ)
    assert launch is not None, "started by tools/soak.py"
    write_atomically(folder / f"rank-{launch.rank}", str(os.getpid()))
    keras.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()
    logging.basicConfig()
    logging.getLogger("tfscale").setLevel(logging.INFO)  # where it resumes
    tfscale.init()
    random = np.random.default_rng(7)
    x = random.normal(size=(STEPS_PER_EPOCH * _BATCH_SIZE, 16)).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True))
    model = make_model()
    optimizer = keras.optimizers.Adam(0.001)
    name, _, few = exchange.partition("-")
    options = {"exchange": _EXCHANGES[name](), "compression": getattr(Compression, few or "none")}
    model.compile(tfscale.DistributedOptimizer(optimizer, **options), loss="mse")
    model.fit(
        GlobalBatches(x, y, batch_size=_BATCH_SIZE, seed=5),
        epochs=n_steps // STEPS_PER_EPOCH,
        verbose=0,
        callbacks=[
            Checkpoint(folder / "checkpoints", every_n_steps=20),
            BroadcastGlobalVariablesCallback(0),
            Pace(folder),
        ],
    )
    state = model.optimizer.full_state()
    if tfscale.rank() == 0:
        np.savez(folder / "final.npz", *model.get_weights(), *state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
