"""Optimizers, strategies and layers that are used again, or by two at once."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import engine_only, sizes
from tests.helpers.ranks import float64, require_error, values_of
from tfscale.testing import inspect, require_close, require_equal_ranks, require_identical


def build(n_out=2):
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(40, "tanh"), keras.layers.Dense(n_out)]
    return keras.Sequential([keras.Input((30,)), *layers])


def arrays():
    random = np.random.default_rng(2)
    return random.normal(size=(16, 30)), random.normal(size=(16, 2))


def samples():
    return tfscale.data.GlobalBatches(*arrays(), batch_size=8, shuffle=False)


def start():
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


def train(optimizer, model=None, epochs=2):
    model = model or build()
    model.compile(optimizer, "mse")
    model.fit(samples(), epochs=epochs, verbose=0, callbacks=[start()])
    return model


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """As in tutorials: without get_config, which only saving needs."""

    def __call__(self, step):
        return 0.1 / (1.0 + 0.1 * keras.ops.cast(step, "float32"))


@sizes(1, 2, timeout_s=120)
def case_schedules_that_cannot_be_serialized():
    for rate in (Schedule(), lambda: 0.05):
        for exchange in ("allreduce", "sharded"):
            rule = keras.optimizers.Adam(rate)
            model = train(hvd.DistributedOptimizer(rule, exchange=exchange))
            require_equal_ranks(model.trainable_variables)


@sizes(2, timeout_s=120)
def case_frozen_layers_leave_the_state():
    """A partial layer that is frozen between two fits: the optimizer continues counting."""
    with float64():
        exchange = tfscale.Sharded(dense="partial")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), exchange=exchange)
        model = train(optimizer)
        before = [np.array(v) for v in optimizer.full_state()]
        frozen = model.layers[0].get_weights()
        model.layers[0].trainable = False
        train(optimizer, model, epochs=1)
        after = optimizer.full_state()
        assert int(after[0]) == int(before[0]) + 2, (after[0], before[0])
        assert [v.shape for v in before] == [np.shape(v) for v in after]
        require_identical(model.layers[0].get_weights(), frozen)


@sizes(2, timeout_s=120)
@engine_only("its messages are looked at")
def case_frozen_layers_send_nothing():
    """A gather that depends on no batch would also run in the step that finds no data."""
    x, y = np.ones((16, 30), "float32"), np.ones((16, 2), "float32")
    spec = tf.TensorSpec((4, 30)), tf.TensorSpec((4, 2))

    def batches():
        yield from ((x[i : i + 4], y[i : i + 4]) for i in range(0, 16, 4))

    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    keras.utils.set_random_seed(5)
    hidden = [keras.layers.Dense(30, "tanh", name=name) for name in ("first", "second")]
    model = keras.Sequential([keras.Input((30,)), *hidden, keras.layers.Dense(2)])
    exchange = tfscale.Sharded(bucket_mb=0, dense="weights")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), exchange=exchange)
    for is_trained in (True, False):
        model.get_layer("second").trainable = is_trained
        model.compile(optimizer, "mse")
        inspect.take_collectives()
        model.fit(data, epochs=2, validation_data=(x, y), verbose=0, callbacks=[start()])
        names = {e.name for e in inspect.take_collectives() if e.plan >= 0}
        assert any("parameters" in name and "first" in name for name in names), names
        assert any("second" in name for name in names) == is_trained, names
    require_equal_ranks(model.trainable_variables)


@sizes(2, 4, timeout_s=120)
def case_a_strategy_for_two_optimizers():
    """One with an outer optimizer; and moving averages of groups are averaged."""
    outer = keras.optimizers.SGD(0.7)
    for options, rule in (
        ({"within": "allreduce", "outer": outer}, lambda: keras.optimizers.SGD(0.05)),
        ({"within": "allreduce"}, lambda: keras.optimizers.Adam(0.01, use_ema=True)),
        ({}, lambda: keras.optimizers.Adam(0.01, use_ema=True)),
    ):
        strategy = tfscale.LocalSGD(2, 3, **options)
        for _ in range(2 if "outer" in options else 1):
            model = train(hvd.DistributedOptimizer(rule(), exchange=strategy))
            require_equal_ranks(model.trainable_variables)


class Twice(keras.Model):
    def __init__(self, inner, second):
        super().__init__()
        self.inner, self.second = inner, second

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, y = data
        for optimizer in (self.optimizer, self.second):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            variables = self.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@sizes(2, timeout_s=120)
def case_two_optimizers_share_variables():
    """The second one's updates last, as in one process."""

    def run(wrap):
        inner = build()
        first, second = keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.03)
        model = Twice(inner, wrap(second, "allreduce"))
        model.compile(wrap(first, tfscale.Sharded(dense="weights")), "mse")
        model.build((None, 30))
        return model

    with float64():
        model = run(lambda rule, exchange: hvd.DistributedOptimizer(rule, exchange=exchange))
        model.fit(samples(), epochs=2, verbose=0, callbacks=[start()])
        single = run(lambda rule, exchange: rule)
        x, y = arrays()
        for i in (0, 8, 0, 8):
            single.train_step((x[i : i + 8], y[i : i + 8]))
        require_close(model.get_weights(), single.get_weights())


@sizes(2, timeout_s=60)
def case_a_common_norm_with_local_layers_is_refused():
    model = build()
    optimizer = tfscale.PartialDistributedOptimizer(
        keras.optimizers.Adam(0.1, global_clipnorm=1.0), local_layers=model.layers[-1]
    )
    text = "global_clipnorm needs equal gradients on all ranks"
    require_error(lambda: train(optimizer, model), text)


RULES = (
    lambda: keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True),
    lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.02)),
)


def go_on(optimizer, wrap, fit):
    """Train with one optimizer whose rate is set, and which is compiled and wrapped again."""
    keras.utils.set_random_seed(5)
    dense = [keras.layers.Dense(64, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((30,)), *dense])
    for exchange, rate in (("allreduce", None), ("sharded", 0.03), ("allreduce", 0.01)):
        model.compile(wrap(optimizer, exchange), "mse")
        if rate is not None:
            optimizer.learning_rate = rate
        count = optimizer.iterations
        fit(model)
        assert optimizer.iterations is count
    return model


def fit_alone(model):
    x, y = arrays()
    for i in (0, 8):
        model.train_step((x[i : i + 8], y[i : i + 8]))
    model.optimizer.finalize_variable_values(model.trainable_variables)


def fit_together(model):
    model.fit(samples(), verbose=0, callbacks=[start()])


@sizes(2, 4, timeout_s=240)
def case_an_optimizer_stays_the_one_of_the_script():
    """Built before, on variables or on pieces of them: its rate, count and state are kept."""

    def wrap(rule, exchange):
        return hvd.DistributedOptimizer(rule, exchange=exchange)

    with float64():
        for rule in RULES:
            alone, held = go_on(rule(), lambda rule, _: rule, fit_alone), rule()
            model = go_on(held, wrap, fit_together)
            assert model.optimizer.__wrapped__ is held
            assert held.get_config() == model.optimizer.get_config()
            require_close(model.get_weights(), alone.get_weights())
            require_close(values_of(held.variables), values_of(alone.optimizer.variables))
