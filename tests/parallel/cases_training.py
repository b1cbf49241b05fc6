"""The ways to train that Keras offers: each leaves the ranks equal, or is refused with a remedy."""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import in_both_modes, require_error, values_of
from tfscale import DistributedGradientTape, DistributedOptimizer
from tfscale.testing import require_close, require_equal_ranks

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
BATCH, STEPS = 3, 8


def global_data():
    """Samples in the order steps, ranks, batch."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(STEPS, tfscale.size(), BATCH, 4)).astype("float32")
    y = np.sin(x).sum(axis=-1, keepdims=True)
    return x.astype("float64"), y.astype("float64")  # fit makes them float32 and loses nothing


def own_data():
    return [part[:, tfscale.rank()].reshape(STEPS * BATCH, -1) for part in global_data()]


def new_model(optimizer=None, **options):
    keras.utils.set_random_seed(2)
    inputs = keras.Input((4,), dtype="float64")
    x = keras.layers.Dense(5, activation="tanh", dtype="float64", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float64", name="out")(x))
    if optimizer is not None:
        model.compile(optimizer, keras.losses.MeanSquaredError(dtype="float64"), **options)
    return model


def reference():
    model = new_model(Adam(0.01))
    data = [part.reshape(-1, part.shape[-1]) for part in global_data()]
    model.fit(*data, batch_size=BATCH * tfscale.size(), shuffle=False, verbose=0, epochs=2)
    return values_of(model.variables)


def check(model, expected=None):
    require_equal_ranks([*model.variables, *model.optimizer.variables])
    require_close(model.variables, expected or reference(), rtol=1e-10, atol=1e-12)


def fit(model, **options):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": 2, **options}
    model.fit(*own_data(), **options)
    return model


def case_fit_in_its_modes():
    expected = reference()
    for options in ({}, {"steps_per_execution": 4}, {"run_eagerly": True}):
        model = fit(new_model(DistributedOptimizer(Adam(0.01)), **options), epochs=1)
        model.evaluate(*own_data(), verbose=0)
        model.predict(own_data()[0], verbose=0)
        check(fit(model, epochs=1), expected)


def case_train_on_batch():
    model = new_model(DistributedOptimizer(Adam(0.01)))
    for x, y in [*zip(*(np.split(part, STEPS) for part in own_data()), strict=True)] * 2:
        model.train_on_batch(x, y)
    check(model)


def case_frozen_layers():
    """And trained on, after they were."""
    model = new_model()
    hidden = model.get_layer("hidden")
    for trainable in (False, True):
        hidden.trainable = trainable
        model.compile(DistributedOptimizer(Adam(0.01)), "mse")
        before = values_of(model.variables)
        fit(model)
        require_equal_ranks([*model.variables, *model.optimizer.variables])
        changed = [(v.numpy() != b).any() for v, b in zip(model.variables, before, strict=True)]
        assert changed == [trainable] * 2 + [True] * 2
        assert len(model.optimizer.variables) == 2 + 2 * (4 if trainable else 2)


def run_tape(is_traced, **options):
    model = new_model()
    optimizer = Adam(0.01)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    step = tf.function(step) if is_traced else step
    for x, y in [*zip(*(np.split(part, STEPS) for part in own_data()), strict=True)] * 2:
        step(tf.constant(x), tf.constant(y))
    model.optimizer = optimizer
    return model


def case_tape():
    expected = reference()
    for is_traced in (True, False):
        check(run_tape(is_traced), expected)
    check(run_tape(True, gradient_predivide_factor=2.0, num_groups=3), expected)


def case_tape_keeps_structures():
    rank, size = tfscale.rank(), tfscale.size()
    own = tf.Variable([1.0, 2.0])
    shared = {"a": tf.Variable([2.0]), "b": [keras.Variable([3.0], name="b")]}
    unused = tf.Variable(1.0)
    tape = DistributedGradientTape(tf.GradientTape(persistent=True), op=tfscale.Sum)
    tape.register_local_var(own)
    with tape:
        loss = (rank + 1.0) * (tf.reduce_sum(own) + shared["a"][0] + 2.0 * shared["b"][0].value[0])
    total = size * (size + 1) / 2
    result = tape.gradient(loss, [shared, own, unused])
    assert result[0]["a"].numpy() == total and result[0]["b"][0].numpy() == 2 * total
    np.testing.assert_allclose(result[1].numpy(), [(rank + 1) / size] * 2, rtol=1e-7)
    assert result[2] is None
    assert tape.gradient(loss, shared["a"]).numpy() == total  # one source, a persistent tape
    assert tape.watched_variables()


def case_prepare_builds_from_a_batch():
    """A model without shapes, which nothing else could build before its first step."""
    keras.utils.set_random_seed(2 + tfscale.rank())
    model = keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(1)])
    model.compile(DistributedOptimizer(SGD(0.01)), "mse")
    assert tfscale.prepare(model, own_data()[0][:1]) is model
    assert model.built and len(model.trainable_variables) == 4
    tfscale.broadcast_variables(model.trainable_variables)
    fit(model)
    require_equal_ranks([*model.variables, *model.optimizer.variables])


@sizes(2, 3)
def case_xla_is_refused_or_switched_off():
    text = "jit_compile must be False where collectives run."
    model = new_model(DistributedOptimizer(SGD(0.01)), jit_compile=True)
    require_error(lambda: fit(model), text, "tfscale.prepare(model)")
    refusal = "jit_compile must be False to exchange gradients. Received: jit_compile=True."
    asked = new_model(DistributedOptimizer(SGD(0.01)), jit_compile=True)
    require_error(lambda: tfscale.prepare(asked), refusal, "jit_compile=False")
    require_error(lambda: fit(asked, callbacks=[tfscale.callbacks.Callback()]), refusal)
    with mock.patch.object(keras.Model, "_resolve_auto_jit_compile", lambda self: True):
        automatic = new_model(DistributedOptimizer(Adam(0.01)))
        assert automatic.jit_compile
        tfscale.prepare(automatic)
        assert not automatic.jit_compile
        check(fit(automatic))
    compiled = tf.function(lambda x: tfscale.allreduce(x), jit_compile=True)
    require_error(lambda: compiled(tf.ones([2])), "where collectives run", "jit_compile=False")


def case_tape_of_tensors():
    """Sources may be tensors, as for a penalty on gradients of the inputs."""
    rank, size = tfscale.rank(), tfscale.size()

    def gradient(x):
        tape = DistributedGradientTape(tf.GradientTape())
        with tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * x) * (rank + 1.0)
        return tape.gradient(loss, x)

    for result in in_both_modes(gradient, tf.constant([1.0, 2.0])):
        np.testing.assert_allclose(result.numpy(), np.array([2.0, 4.0]) * (size + 1) / 2, rtol=1e-6)
