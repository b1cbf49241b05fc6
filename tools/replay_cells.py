"""The cells of `tools/replay.py`: six tiny models, each trained with each exchange.

A cell is named `model/exchange/ranks`. `python tools/replay_cells.py RECORDS CELL...`, started by
mpiexec with that number of ranks, runs cells one after another, and rank 0 adds one line of JSON
per cell to RECORDS:

    {"cell": "vgg/sharded/2", "cpu_s": 3.1, "plan": [...], "labels": [...], "weights": [...], ...}

Each section is a list of [name, value] pairs. `plan` and `labels` have one per slot, in the order
of the slots: executions and bytes, and the name of what is sent. `weights` and `optimizer` have one
per variable: a digest of its bits. Where ranks differ there are pairs of each rank.

Of tfscale only public names are used, so that the same file runs on any two commits.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Pairs = list[tuple[str, str]]
Slot = tuple[str, str, str]

SECTIONS = ("plan", "labels", "weights", "optimizer")
MODELS = ("vgg", "resnet", "edsr", "lstm", "outputs", "subclass")
RANKS = (1, 2, 3, 4)
GLOBAL_BATCH = 12  # a multiple of each number of ranks
EPOCHS, STEPS = 2, 6  # per epoch
# "auto" trains 13 steps with allreduce and with each plan that it tries. Training ends during the
# second plan, before the choice between them, which depends on measured times.
AUTO_STEPS = 16
_WITHOUT_DENSE = ("edsr",)

# Small buckets and few layers in the first chunk, so that each model has several slots.
_BUCKET_MB = 0.004
_DENSE = ("chunked-dense", "weights", "partial", "replicated")
_EVERYWHERE = ("allreduce", "chunked", "chunked-dense", "sharded", "weights")
EXCHANGES = (*_EVERYWHERE, "partial", "replicated", "auto", "local", "local-sharded")

QUICK = (
    "vgg/allreduce/2",
    "vgg/chunked/2",
    "vgg/partial/2",
    "resnet/sharded/2",
    "edsr/local-sharded/2",
    "lstm/allreduce/2",
    "lstm/sharded/2",
    "outputs/chunked-dense/2",
    "outputs/auto/2",
    "subclass/replicated/2",
)


def all_cells() -> list[str]:
    """Return the names of all cells; local SGD has two groups, of one rank in a quick cell."""
    cells = []
    for n_ranks, model, exchange in itertools.product(RANKS, MODELS, EXCHANGES):
        has_routes = model not in _WITHOUT_DENSE or exchange not in _DENSE
        if has_routes and (n_ranks == 4 or not exchange.startswith("local")):
            cells.append(f"{model}/{exchange}/{n_ranks}")
    return [*cells, *(cell for cell in QUICK if cell not in cells)]


def standard_cells() -> list[str]:
    """Return the cells of a quarter of an hour.

    Each model is trained with each exchange on 2 ranks, on 3 or 4 in turn, and every third pair of
    them on 1; local SGD on 4.
    """
    cells = []
    for cell in all_cells():
        model, exchange, ranks = cell.split("/")
        turn = MODELS.index(model) + EXCHANGES.index(exchange)
        is_on = {"1": turn % 3 == 0, "2": True, "3": turn % 2 == 0, "4": turn % 2 == 1}
        if is_on[ranks] or exchange.startswith("local"):
            cells.append(cell)
    return cells


def exchange_of(name: str, machine: str) -> Any:
    """Return a strategy.

    Args:
        name: One of `EXCHANGES`.
        machine: File of the machine that "auto" plans for.

    Raises:
        TypeError: This version of tfscale has no such option.
    """
    import tfscale

    kind, _, variant = name.partition("-")
    if kind == "allreduce":
        return tfscale.Allreduce(bucket_mb=_BUCKET_MB)
    if kind == "chunked":
        options: dict[str, Any] = {"first_chunk_layers": 2}
        if variant:
            options["replicated_dense"] = "auto"
            if "global_batch" in tfscale.Chunked.__dataclass_fields__:  # until November 2026
                options["global_batch"] = GLOBAL_BATCH
        return tfscale.Chunked(**options)
    if kind == "auto":
        return tfscale.Auto(machine=machine, replan=False)
    if kind == "local":
        within = tfscale.Sharded(_BUCKET_MB) if variant else tfscale.Allreduce(_BUCKET_MB)
        return tfscale.LocalSGD(groups=2, interval=5, within=within)
    dense: Any = "auto" if kind == "sharded" else kind
    return tfscale.Sharded(_BUCKET_MB, dense=dense)


def vgg() -> Any:
    """Convolutions, then dense layers with most of the parameters."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, padding="same", activation="relu", name="conv1"),
            layers.MaxPooling2D(name="pool1"),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="conv2"),
            layers.MaxPooling2D(name="pool2"),
            layers.Flatten(name="flatten"),
            layers.Dense(96, activation="relu", name="fc1"),
            layers.Dropout(0.2, seed=3, name="drop"),
            layers.Dense(48, activation="relu", name="fc2"),
            layers.Dense(10, name="fc3"),
        ],
        name="vgg",
    )


def resnet() -> Any:
    """Residual blocks; the first statistics are those of all ranks."""
    import keras

    import tfscale

    layers = keras.layers

    def block(x: Any, n: int, strides: int, name: str) -> Any:
        y = layers.Conv2D(n, 3, strides, padding="same", use_bias=False, name=f"{name}_conv1")(x)
        y = layers.BatchNormalization(name=f"{name}_norm1")(y)
        y = layers.ReLU(name=f"{name}_relu1")(y)
        y = layers.Conv2D(n, 3, padding="same", use_bias=False, name=f"{name}_conv2")(y)
        y = layers.BatchNormalization(name=f"{name}_norm2")(y)
        if strides > 1:
            x = layers.Conv2D(n, 1, strides, use_bias=False, name=f"{name}_short")(x)
        return layers.ReLU(name=f"{name}_relu2")(layers.Add(name=f"{name}_add")([x, y]))

    inputs = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", use_bias=False, name="stem")(inputs)
    x = layers.ReLU(name="stem_relu")(tfscale.SyncBatchNormalization(name="stem_norm")(x))
    x = block(block(x, 8, 1, "one"), 16, 2, "two")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(24, activation="relu", name="hidden")(x)
    return keras.Model(inputs, layers.Dense(10, name="top")(x), name="resnet")


def edsr() -> Any:
    """Residual blocks without normalisation, and pixels from channels."""
    import keras

    layers = keras.layers

    def conv(n: int, name: str, **options: Any) -> Any:
        return layers.Conv2D(n, 3, padding="same", name=name, **options)

    inputs = keras.Input((8, 8, 3), name="image")
    x = first = conv(12, "head")(inputs)
    for name in ("one", "two"):
        y = conv(12, f"{name}_conv2")(conv(12, f"{name}_conv1", activation="relu")(x))
        y = layers.Rescaling(0.1, name=f"{name}_scale")(y)
        x = layers.Add(name=f"{name}_add")([x, y])
    x = layers.Add(name="skip")([first, conv(12, "body")(x)])
    x = layers.Reshape((8, 8, 2, 2, 3), name="split")(x)
    x = layers.Permute((1, 3, 2, 4, 5), name="shuffle")(x)
    x = layers.Reshape((16, 16, 3), name="join")(x)
    return keras.Model(inputs, conv(3, "tail")(x), name="edsr")


def lstm() -> Any:
    """An embedding, whose gradients are rows, and a recurrent layer."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(60, 12, name="words"),
            layers.LSTM(10, name="memory"),
            layers.Dense(48, activation="tanh", name="hidden"),
            layers.Dense(32, activation="tanh", name="narrow"),
            layers.Dense(1, activation="sigmoid", name="top"),
        ],
        name="lstm",
    )


def outputs() -> Any:
    """Two inputs and two outputs with a loss each."""
    import keras

    layers = keras.layers
    left, right = keras.Input((20,), name="left"), keras.Input((9,), name="right")
    x = layers.Dense(40, activation="tanh", name="left_in")(left)
    y = layers.Dense(16, activation="tanh", name="right_in")(right)
    x = layers.Concatenate(name="both")([x, y])
    x = layers.Dense(64, activation="tanh", name="shared")(x)
    ends = {
        "label": layers.Dense(5, name="label")(x),
        "value": layers.Dense(1, name="value")(layers.Dense(24, name="before_value")(x)),
    }
    return keras.Model({"left": left, "right": right}, ends, name="outputs")


def subclass() -> Any:
    """A subclass of Model that is built by its first batch."""
    import keras

    layers = keras.layers

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="subclass")
            self.wide = layers.Dense(64, use_bias=False, name="wide")
            self.norm = layers.BatchNormalization(name="norm")
            self.middle = layers.Dense(40, activation="relu", name="middle")
            self.last_norm = layers.BatchNormalization(name="last_norm")
            self.top = layers.Dense(4, name="top")

        def call(self, x: Any, training: bool | None = None) -> Any:
            x = keras.activations.relu(self.norm(self.wide(x), training=training))
            return self.top(self.last_norm(self.middle(x), training=training))

    return Net()


def samples_of(model: str, n: int) -> tuple[Any, Any]:
    """Return inputs and targets, equal on all ranks."""
    import numpy as np

    random = np.random.default_rng(7)

    def values(*shape: int) -> Any:
        return random.normal(size=(n, *shape)).astype("float32")

    def labels(n_classes: int) -> Any:
        return random.integers(0, n_classes, n)

    if model == "edsr":
        return values(8, 8, 3), values(16, 16, 3)
    if model == "lstm":
        return random.integers(0, 60, (n, 7)).astype("int32"), labels(2).astype("float32")
    if model == "outputs":
        return (
            {"left": values(20), "right": values(9)},
            {"label": labels(5), "value": values(1)},
        )
    if model == "subclass":
        return values(30), labels(4)
    return values(8, 8, 3), labels(10)


def compiled(model: str, exchange: Any) -> Any:
    """Return a model with the optimizer and the loss that go with it.

    Each model has another update rule: with whole tensors (LARS), decoupled decay, clipping by
    global norm, a schedule.
    """
    import keras

    import tfscale.keras as hvd
    from tfscale.optimizer.lars import LARS

    optimizers = keras.optimizers
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    falling = optimizers.schedules.ExponentialDecay(0.05, 5, 0.8)
    rules: dict[str, Callable[[], Any]] = {
        "vgg": lambda: optimizers.Adam(0.002),
        "resnet": lambda: LARS(0.5, weight_decay=1e-4, trust_coefficient=0.02),
        "edsr": lambda: optimizers.AdamW(0.002, weight_decay=0.01),
        "lstm": lambda: optimizers.Adam(0.01, global_clipnorm=0.3),
        "outputs": lambda: optimizers.SGD(falling, momentum=0.9, nesterov=True),
        "subclass": lambda: optimizers.RMSprop(0.003, momentum=0.9),
    }
    losses = {
        "edsr": "mae",
        "lstm": "binary_crossentropy",
        "outputs": {"label": classes, "value": "mse"},
    }
    made = globals()[model]()
    optimizer = hvd.DistributedOptimizer(rules[model](), exchange=exchange)
    made.compile(optimizer, loss=losses.get(model, classes))
    return made


def machine_for(model: str, inputs: Any) -> dict[str, Any]:
    """Return a machine with slow links on which each layer takes the same time.

    Args:
        model: Name of the model.
        inputs: Of one batch, by which a subclass is built.

    Returns:
        The content of a file of `tfscale tune links`, with the times of the model's layers: "auto"
        plans at once and measures nothing.
    """
    made = globals()[model]()
    made(inputs)
    names = [layer.path for layer in made._flatten_layers() if layer.trainable_weights]
    return {
        "name": "replay",
        "latency_s": 1e-6,
        "bytes_per_s": 1e6,
        "reduce_bytes_per_s": 1e9,
        "flops_per_s": 1e12,
        "memory_bytes_per_s": 1e12,
        "layer_times": {
            model: {
                "batch": GLOBAL_BATCH,
                "forward_s": dict.fromkeys(names, 1e-3),
                "backward_s": dict.fromkeys(names, 2e-3),
            }
        },
    }


def run(cell: str, folder: Path) -> dict[str, Any]:
    """Train a cell and return its record. Collective.

    Args:
        cell: Its name.
        folder: For files; the same on all ranks, and of this job alone.
    """
    import keras

    import tfscale
    import tfscale.keras as hvd

    model_name, exchange_name, _ = cell.split("/")
    steps = AUTO_STEPS if exchange_name == "auto" else STEPS
    x, y = samples_of(model_name, steps * GLOBAL_BATCH)
    keras.backend.clear_session()
    machine = folder / "machine.json"
    if exchange_name == "auto":
        first = {k: v[:1] for k, v in x.items()} if isinstance(x, dict) else x[:1]
        content = machine_for(model_name, first)
        keras.backend.clear_session()
        if tfscale.rank() == 0:
            machine.write_text(json.dumps(content))
        tfscale.barrier()
    try:
        exchange = exchange_of(exchange_name, str(machine))
    except TypeError as error:
        return {"cell": cell, "error": str(error)}
    keras.utils.set_random_seed(11)
    model = compiled(model_name, exchange)
    data = tfscale.data.GlobalBatches(x, y, batch_size=GLOBAL_BATCH, seed=5)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with timeline(folder / "timeline.json") as slots:
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[start])
    state = model.optimizer.full_state()
    names = [f"{i} ({v.path})" for i, v in enumerate(model.optimizer.variables)]
    return {
        "cell": cell,
        "plan": [(name, size) for name, size, _ in slots],
        "labels": [(name, label) for name, _, label in slots],
        "weights": gather_pairs([(v.path, digest(v.numpy())) for v in model.variables]),
        "optimizer": gather_pairs(list(zip(names, map(digest, state), strict=True))),
    }


def digest(array: Any) -> str:
    """Return dtype, shape and a digest of an array's bits."""
    bits = hashlib.sha256(array.tobytes()).hexdigest()
    return f"{array.dtype}{list(array.shape)} {bits[:24]}"


def gather_pairs(own: Pairs) -> Pairs:
    """Return what ranks recorded, once where it is equal. Collective."""
    import tfscale

    return merge_ranks(tfscale.allgather_object(own))


def merge_ranks(every: Sequence[list[Any]]) -> list[Any]:
    """Return what ranks recorded, once where it is equal.

    Args:
        every: Per rank, tuples that begin with a name.
    """
    if all(own == every[0] for own in every):
        return every[0]
    return [(f"rank {rank} {n}", *rest) for rank, own in enumerate(every) for n, *rest in own]


@contextlib.contextmanager
def timeline(path: Path) -> Iterator[list[Slot]]:
    """Record the collectives of the traced functions that run within a block. Collective.

    Args:
        path: Of a file that rank 0 writes.

    Yields:
        A list that rank 0 fills when the block ends.
    """
    import tfscale

    slots: list[Slot] = []
    tfscale.start_timeline(str(path))
    yield slots
    tfscale.stop_timeline()
    if tfscale.rank() == 0:
        slots += slots_of(json.loads(path.read_text()), tfscale.size())
        path.unlink()


def slots_of(content: dict[str, Any], n_ranks: int) -> list[Slot]:
    """Return the slots of a timeline, in order: name, executions and bytes, label.

    Plans are numbered in the order in which they were made, without those that no step has run.
    Eager collectives belong to no plan and are left out.

    Args:
        content: Of a timeline file.
        n_ranks: Number of ranks.
    """
    labels: dict[tuple[int, int, int], str] = {}  # by rank, plan and slot
    sizes: dict[tuple[int, int, int], dict[int, int]] = {}  # and by execution
    for event in content["traceEvents"]:
        details = event.get("args", {})
        if details.get("plan", -1) >= 0:
            key = (event["pid"], details["plan"], details["slot"])
            labels[key] = event["name"]
            sizes.setdefault(key, {})[details["execution"]] = details["bytes"]
    every: list[list[Slot]] = []
    for rank in range(n_ranks):
        own = sorted(key for key in sizes if key[0] == rank)
        plans = sorted({plan for _, plan, _ in own})
        every.append(
            [
                (f"plan {plans.index(k[1])} slot {k[2]}", format_sizes(sizes[k]), labels[k])
                for k in own
            ]
        )
    return merge_ranks(every)


def format_sizes(sizes: Mapping[int, int]) -> str:
    """Return number of executions and bytes; each one's where they are not equal."""
    in_order = [sizes[execution] for execution in sorted(sizes)]
    n_bytes = in_order[:1] if len(set(in_order)) == 1 else in_order
    return f"{len(in_order)} x {','.join(map(str, n_bytes))} bytes"


def main() -> None:
    """Run the cells that are named on the command line."""
    import tensorflow as tf

    import tfscale

    records, cells = Path(sys.argv[1]), sys.argv[2:]
    tree = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    if not Path(tfscale.__file__).is_relative_to(tree):
        raise SystemExit(f"tfscale must come from {tree}. Received: {tfscale.__file__}.")
    tf.config.experimental.enable_op_determinism()
    tfscale.init()
    before = 0.0  # the first cell pays for the start
    for cell in cells:
        record = run(cell, records.parent)
        now = time.process_time()
        record["cpu_s"] = round(sum(tfscale.allgather_object(now - before)), 2)
        before = now
        if tfscale.rank() == 0:
            with records.open("a") as file:
                file.write(json.dumps(record) + "\n")
    tfscale.shutdown()


if __name__ == "__main__":
    main()
