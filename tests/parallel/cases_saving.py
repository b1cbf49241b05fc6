"""What ranks save loads as plain Keras in a process that cannot import tfscale."""

import json
import os
import subprocess
import sys
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import dtype_policy, shared_folder
from tfscale import DistributedOptimizer
from tfscale.optimizer import saving
from tfscale.testing import require_identical

LSO, Adam = keras.optimizers.LossScaleOptimizer, keras.optimizers.Adam

LOADER = """
import json, sys
sys.modules["tfscale"] = None  # every import of it raises
from pathlib import Path
import keras, numpy as np, tensorflow as tf

folder = Path(sys.argv[1])

def described(model, optimizer):
    variables = [*model.variables, *optimizer.variables]
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "values": [np.asarray(v.numpy(), "float64").ravel().tolist() for v in variables],
    }

def built(model):
    model.optimizer.build(model.trainable_variables)
    return model

found = {}
for name in ("model.keras", "model.h5", "scaled.keras"):
    model = keras.models.load_model(folder / name)
    found[name] = described(model, model.optimizer)
    if name != "model.h5":  # Keras itself does not restore the optimizer of a Sequential from it
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
model = built(keras.models.load_model(folder / "fresh.keras"))
model.load_weights(folder / "model.weights.h5")
found["model.weights.h5"] = described(model, model.optimizer)
model = built(keras.models.load_model(folder / "fresh.keras"))
checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
checkpoint.read(str(folder / "checkpoint")).assert_existing_objects_matched()
found["checkpoint"] = described(model, model.optimizer)
(folder / "found.json").write_text(json.dumps(found))
"""


def new_model(optimizer, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(2, name="hidden"), keras.layers.Dense(1, name="out")]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer, keras.losses.MeanSquaredError(), **options)
    return model


def train(model):
    rng = np.random.default_rng(tfscale.rank())
    model.fit(rng.normal(size=(8, 3)), rng.normal(size=(8, 1)), batch_size=2, verbose=0)
    return model


def values(model):
    """Return all weights, then the complete state. Collective."""
    arrays = [*(v.numpy() for v in model.variables), *model.optimizer.full_state()]
    return [np.asarray(a, "float64").ravel().tolist() for a in arrays]


def load_without_tfscale(folder):
    launchers = ("PMI", "PMIX", "MPI", "HYDRA", "OMPI")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(folder)],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@sizes(1, 2, 3, 4, timeout_s=300)
def case_files_load_where_tfscale_is_not():
    """Saved by rank 0 alone; all ranks save where the state is shared out, each file once."""
    is_first = tfscale.rank() == 0
    for exchange in ["allreduce", *[tfscale.Sharded()] * (tfscale.size() > 1)]:

        def prepared(inner, exchange=exchange, **options):
            optimizer = DistributedOptimizer(inner, exchange=exchange)
            return tfscale.prepare(new_model(optimizer, **options))

        is_shared = exchange != "allreduce"
        model = train(prepared(Adam(0.01)))
        with dtype_policy("mixed_float16"):
            scaled = train(prepared(LSO(Adam(0.01)), auto_scale_loss=False))
        assert bool(model.optimizer.bound.kept and scaled.optimizer.bound.kept) == is_shared
        with shared_folder() as folder:
            if is_first:
                new_model(DistributedOptimizer(Adam(0.01))).save(folder / "fresh.keras")
            with mock.patch.object(saving, "save_beside", wraps=saving.save_beside) as written:
                if is_first or is_shared:
                    model.save(folder / "model.keras")
                    model.save(folder / "model.h5")
                    model.save_weights(folder / "model.weights.h5")
                    scaled.save(folder / "scaled.keras")
            assert not is_shared or written.call_count == 4 * is_first
            expected = {id(m): values(m) for m in (model, scaled)}
            if is_first:  # full_state was called by all ranks just before
                checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
                checkpoint.write(str(folder / "checkpoint"))
                for name, content in load_without_tfscale(folder).items():
                    is_scaled = name == "scaled.keras"
                    class_name = "LossScaleOptimizer" if is_scaled else "Adam"
                    assert content["class"].startswith("keras.") and class_name in content["class"]
                    wanted = expected[id(scaled if is_scaled else model)]
                    n_values = len(model.variables) if name == "model.h5" else None
                    require_identical(content["values"][:n_values], wanted[:n_values], name)


@sizes(2)
def case_repaired_loss_scaling_loads_as_keras_made_it():
    with dtype_policy("mixed_float16"):
        model = new_model(DistributedOptimizer(Adam(0.01)))
        tfscale.prepare(model)
        train(model)
        with shared_folder() as folder:
            if tfscale.rank() == 0:
                model.save(folder / "model.keras")
                loaded = keras.models.load_model(folder / "model.keras")
                assert type(loaded.optimizer) is LSO
                assert type(loaded.optimizer.inner_optimizer) is Adam
                require_identical(model.optimizer.variables, loaded.optimizer.variables)


@sizes(2, 3)
def case_checkpoint_of_ranks_goes_on():
    """Written by rank 0, restored by all into new objects: training continues as before."""
    model = train(new_model(DistributedOptimizer(Adam(0.01))))
    with shared_folder() as folder:
        if tfscale.rank() == 0:
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "c"))
        tfscale.barrier()
        other = new_model(DistributedOptimizer(Adam(0.5)))
        other.optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(str(folder / "c"))
    assert values(other) == values(model)
    assert values(train(other)) == values(train(model))
