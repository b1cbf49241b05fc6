"""The picture of docs/overlap.md: one recorded step of a small model.

tfscale run -np 2 python tools/draw_overlap.py [PNG]
"""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure

import tfscale
from tfscale.callbacks import BroadcastGlobalVariablesCallback, CommunicationReport
from tfscale.measure.report import draw_step, of_kind, read_rows

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "overlap.png"
UNITS, N_SAMPLES, N_STEPS = 768, 256, 40


def build() -> keras.Model:
    """Return six layers in two chunks of three."""
    layers = [keras.layers.Dense(UNITS, "relu", name=f"layer{i}") for i in range(1, 7)]
    model = keras.Sequential([keras.Input((UNITS,)), *layers])
    optimizer = tfscale.DistributedOptimizer(
        keras.optimizers.Adam(1e-4), exchange=tfscale.Chunked(first_chunk_layers=3)
    )
    model.compile(optimizer, loss="mse")
    return model


def main() -> None:
    """Train for some steps; rank 0 draws the one that other programs disturbed least."""
    tfscale.init()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(N_STEPS * N_SAMPLES, UNITS)).astype("float32")
    with tempfile.TemporaryDirectory() as folder:
        report = CommunicationReport(folder, every_n_steps=1)
        callbacks = [BroadcastGlobalVariablesCallback(0), report]
        build().fit(x, x, N_SAMPLES, epochs=2, verbose=0, callbacks=callbacks)
        if tfscale.rank() > 0:
            return
        rows = read_rows(folder)
        # The first steps of a fit warm up; others disturb a step on any rank.
        times: dict[tuple[int, int], float] = {}
        for step in of_kind(rows, "step"):
            place = step["epoch"], step["step"]
            times[place] = max(step["step_s"], times.get(place, 0.0))
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        draw_step(figure.subplots(), rows, min(times, key=lambda place: times[place]))
        figure.savefig(sys.argv[1] if len(sys.argv) > 1 else PICTURE, dpi=120)


if __name__ == "__main__":
    main()
