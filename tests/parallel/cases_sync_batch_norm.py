"""SyncBatchNormalization equals one process on the union of the ranks' samples."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import float64, require_error, values_of
from tfscale.testing import require_close


def run(layer, x, mask, is_traced):
    """Return output, gradients by the input and by scale and offset, and moving statistics."""
    layer.build(x.shape)

    def forward(x, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=mask)
            loss = tf.reduce_sum(tf.sin(y) * [0.5, -1.0, 2.0])
        return y, *tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])

    forward = tf.function(forward) if is_traced else forward
    results = [r.numpy() for r in forward(x, mask)]
    return results, values_of([layer.moving_mean, layer.moving_variance])


def case_uneven_batches_and_masks():
    """Forward, backward and moving statistics equal one process on the union."""
    rank, size = tfscale.rank(), tfscale.size()
    rng = np.random.default_rng(4)
    every = [rng.normal(3.0, 2.0, size=(r + 1, 5, 3)) for r in range(size)]
    masks = [rng.random(size=(r + 1, 5)) < 0.6 for r in range(size)]
    masks[-1][0] = False  # a sample without any step

    for use_mask in (False, True):
        union = tf.constant(np.concatenate(every))
        union_mask = tf.constant(np.concatenate(masks)) if use_mask else None
        plain = keras.layers.BatchNormalization(dtype="float64")
        (y, x_error, *errors), statistics = run(plain, union, union_mask, True)
        begin = rank * (rank + 1) // 2
        rows = slice(begin, begin + rank + 1)
        for is_traced in (True, False):
            layer = tfscale.SyncBatchNormalization(dtype="float64")
            mask = tf.constant(masks[rank]) if use_mask else None
            (own_y, own_x, *own), moving = run(layer, tf.constant(every[rank]), mask, is_traced)
            close = {"rtol": 1e-6, "atol": 1e-6} if use_mask else {"rtol": 1e-9, "atol": 1e-9}
            np.testing.assert_allclose(own_y, y[rows], **close)
            np.testing.assert_allclose(own_x, x_error[rows], **close)
            for mine, wanted in zip(own, errors, strict=True):
                total = sum(tfscale.allgather_object(mine))
                np.testing.assert_allclose(total, wanted, **close)
            require_close(moving, statistics, **close)


def case_a_rank_without_samples():
    """Its statistics count with weight zero instead of making all NaN."""
    n_rows = 4 if tfscale.rank() == 0 else 0
    layer = tfscale.SyncBatchNormalization(momentum=0.0)
    x = tf.reshape(tf.range(2.0 * n_rows), [n_rows, 2])
    for mode in (lambda: layer(x, training=True), tf.function(lambda: layer(x, training=True))):
        assert mode().shape == (n_rows, 2)
        np.testing.assert_allclose(layer.moving_mean.numpy(), [3.0, 4.0], rtol=1e-6)


def normalised(optimizer, synchronized):
    keras.utils.set_random_seed(3)
    norm = keras.layers.BatchNormalization(synchronized=synchronized)
    dense = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((5,)), dense[0], norm, dense[1]])
    model.compile(optimizer, "mse")
    return model


def case_kerass_own_layer_by_hand():
    """`synchronized=True` knows replicas of tf.distribute, and would stay local."""
    rng, n = np.random.default_rng(4), 4 * tfscale.size()
    x, y = rng.normal(size=(2 * n, 5)), rng.normal(size=(2 * n, 2))
    with float64():
        alone = normalised(keras.optimizers.SGD(0.1), synchronized=False)
        for i in (0, n):
            alone.train_step((x[i : i + n], y[i : i + n]))
        model = normalised(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), True)
        data = tfscale.data.GlobalBatches(x, y, batch_size=n, shuffle=False)
        model.fit(data, verbose=0, callbacks=[tfscale.callbacks.Synchronize()])
        require_close(model.get_weights(), alone.get_weights())
        keras.models.clone_model(model)


@sizes(2, timeout_s=60)
def case_replicas_by_hand_are_refused():
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        model = normalised(keras.optimizers.SGD(0.1), synchronized=False)
    for optimizer in (tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), model.optimizer):
        model.optimizer = optimizer
        require_error(
            lambda: model.fit(
                np.ones((4, 5)),
                np.ones((4, 2)),
                verbose=0,
                callbacks=[tfscale.callbacks.Synchronize()],
            ),
            "in the scope of a MirroredStrategy",
        )
