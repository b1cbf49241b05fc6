"""TensorBoard on rank 0: the scalars are those of all ranks, and there is one file of each kind."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfscale
from tests.helpers.ranks import shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.callback_models import functional
from tfscale import Chunked, DistributedOptimizer, Sharded
from tfscale.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback, RankZero
from tfscale.data import GlobalBatches

N_EPOCHS, BATCH = 2, 12


def _data(n_batches, **options):
    rng = np.random.default_rng(n_batches)
    x = rng.normal(size=(n_batches * BATCH, 3)).astype("float32")
    return GlobalBatches(x, (x[:, :1] > 0).astype("float32"), batch_size=BATCH, **options)


def _scalars(folder, tag):
    """Return the steps and values of a scalar in the only file of a folder."""
    assert len(list(folder.iterdir())) == 1
    events = EventAccumulator(str(folder)).Reload().Tensors(tag)
    return [event.step for event in events], [
        float(tf.make_ndarray(event.tensor_proto)) for event in events
    ]


@sizes(2, 3, 4, timeout_s=100)
def case_tensorboard_of_rank_0():
    """Weights that it draws are whole under every exchange, read while parameters are gathered."""
    for exchange in ("allreduce", Chunked(), Sharded()):
        with shared_folder() as folder:
            model = functional()
            model.compile(
                DistributedOptimizer(keras.optimizers.Adam(0.05), exchange=exchange),
                "binary_crossentropy",
            )
            board = keras.callbacks.TensorBoard(folder, histogram_freq=1, update_freq=1)
            history = model.fit(
                _data(3),
                validation_data=_data(2, shuffle=False, drop_remainder=False),
                epochs=N_EPOCHS,
                verbose=0,
                callbacks=[
                    BroadcastGlobalVariablesCallback(0),
                    MetricAverageCallback(),
                    RankZero(board),
                ],
            ).history
            tfscale.barrier()
            if tfscale.rank() == 0:
                epochs = list(range(N_EPOCHS))
                for kind, key in (("train", "loss"), ("validation", "val_loss")):
                    steps, values = _scalars(folder / kind, "epoch_loss")
                    assert steps == epochs
                    np.testing.assert_allclose(values, history[key], rtol=1e-6)
                assert _scalars(folder / "train", "batch_loss")[0] == list(range(1, 7))
                drawn = EventAccumulator(str(folder / "train")).Reload().Tags()["tensors"]
                assert any("kernel" in tag for tag in drawn), drawn
