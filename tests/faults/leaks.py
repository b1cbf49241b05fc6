"""Memory leaks of training steps: `make leaks`, or `measure` in a test.

tfscale run -np 2 python -m tests.faults.leaks --steps 2000
"""

import argparse
import gc
import os

import keras
import numpy as np

import tfscale

WIDTH, BATCH = 128, 8
PAGE = os.sysconf("SC_PAGE_SIZE")
EXCHANGES = {
    "allreduce": lambda: tfscale.Allreduce(),
    "chunked": lambda: tfscale.Chunked(first_chunk_layers=1, replicated_dense=0),
    "dense": lambda: tfscale.Chunked(replicated_dense=1),
    "sharded": lambda: tfscale.Sharded(dense="weights"),
    "partial": lambda: tfscale.Sharded(dense="partial"),
    "local": lambda: tfscale.LocalSGD(groups=2, interval=4),
}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


class Sample(keras.callbacks.Callback):
    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.n_steps = every, 0
        self.samples: list[tuple[int, int]] = []

    def on_train_batch_end(self, batch, logs=None):
        self.n_steps += 1
        if self.n_steps % self.every == 0:
            self.samples.append((self.n_steps, resident_bytes()))


def measure(exchange: str, n_steps: int) -> float:
    """Train; return by how many bytes per step the memory grew over the last three quarters.

    Collective. One step's gradients are 130 KiB, so whatever keeps them shows.
    """
    gc.collect()
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
    inner = keras.optimizers.Adam(1e-3)
    model.compile(tfscale.DistributedOptimizer(inner, exchange=EXCHANGES[exchange]()), "mse")
    x = np.random.default_rng(tfscale.rank()).normal(size=(BATCH * 50, WIDTH)).astype("float32")
    sample = Sample(max(1, n_steps // 40))
    model.fit(
        x,
        x[:, :1],
        batch_size=BATCH,
        epochs=n_steps // 50,
        verbose=0,
        callbacks=[tfscale.callbacks.BroadcastGlobalVariablesCallback(0), sample],
    )
    steps, sizes = np.array([s for s in sample.samples if s[0] > n_steps // 4], float).T
    return float(np.polyfit(steps, sizes, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    tfscale.init()
    for exchange in EXCHANGES:
        growth = max(tfscale.allgather_object(measure(exchange, steps)))
        if tfscale.rank() == 0:
            total = resident_bytes() / 2**20
            text = f"{exchange:10} {growth:8.0f} bytes per step over {steps} steps"
            print(f"{text}, {total:.0f} MiB resident", flush=True)


if __name__ == "__main__":
    main()
