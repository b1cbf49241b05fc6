"""What sharded ranks save is complete and plain Keras; what they load goes on as before."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import dtype_policy, shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.cases_saving import Adam, load_without_tfscale, new_model, train

LSO = keras.optimizers.LossScaleOptimizer


def sharded(inner, **options):
    return tfscale.DistributedOptimizer(inner, exchange=tfscale.Sharded(), **options)


def complete_values(model):
    """Return all weights, then the complete state. Collective."""
    arrays = [*(v.numpy() for v in model.variables), *model.optimizer.full_state()]
    return [np.asarray(a, "float64").ravel().tolist() for a in arrays]


@sizes(2, 3, 4, timeout_s=200)
def case_files_load_where_tfscale_is_not():
    """All ranks save; each file is written once."""
    model = train(tfscale.prepare(new_model(sharded(Adam(0.01)))))
    with dtype_policy("mixed_float16"):
        scaled = tfscale.prepare(new_model(sharded(LSO(Adam(0.01))), auto_scale_loss=False))
        train(scaled)
    assert model.optimizer.parts and scaled.optimizer.parts
    with shared_folder() as folder:
        new_model(tfscale.DistributedOptimizer(Adam(0.01))).save(folder / f"{tfscale.rank()}.keras")
        if tfscale.rank() == 0:
            (folder / "0.keras").rename(folder / "fresh.keras")
        model.save(folder / "model.keras")
        model.save(folder / "model.h5")
        model.save_weights(folder / "model.weights.h5")
        scaled.save(folder / "scaled.keras")
        expected = {id(m): complete_values(m) for m in (model, scaled)}
        if tfscale.rank() == 0:  # full_state was called by all ranks just before
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            checkpoint.write(str(folder / "checkpoint"))
            found = load_without_tfscale(folder)
            for name, content in found.items():
                values = expected[id(scaled if name == "scaled.keras" else model)]
                n_values = len(model.variables) if name == "model.h5" else None
                pairs = zip(values[:n_values], content["values"][:n_values], strict=True)
                for mine, loaded in pairs:
                    np.testing.assert_array_equal(mine, loaded, name)
