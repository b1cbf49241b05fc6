"""Models with a train_step and no call, as Keras's own examples of GANs and VAEs are."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import sizes
from tests.helpers.ranks import require_error, shared_folder, values_of
from tfscale.callbacks import BackupAndRestore, BroadcastGlobalVariablesCallback, Checkpoint
from tfscale.testing import require_equal_ranks, require_identical

SGD = keras.optimizers.SGD


def own_rows():
    return np.random.default_rng(tfscale.rank()).normal(size=(8, 2)).astype("float32")


class Gan(keras.Model):
    def __init__(self, inputs=True):
        super().__init__()
        first = [keras.Input((2,))] * inputs
        self.generator = keras.Sequential([*first, keras.layers.Dense(2)])
        self.discriminator = keras.Sequential([*first, keras.layers.Dense(1)])

    def compile(self, of_generator, of_discriminator):
        super().compile()
        self.rules = {"generator": of_generator, "discriminator": of_discriminator}

    def train_step(self, data):
        real = data[0] if isinstance(data, tuple) else data
        for name, sign in (("discriminator", 1.0), ("generator", -1.0)):
            trained = getattr(self, name).trainable_variables
            with tf.GradientTape() as tape:
                scores = self.discriminator(self.generator(tf.reverse(real, [1])))
                loss = sign * tf.reduce_mean(scores - self.discriminator(real))
            self.rules[name].apply(tape.gradient(loss, trained), trained)
        return {"loss": loss}


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        layers = keras.layers
        self.encoder = keras.Sequential([keras.Input((2,)), layers.Dense(3, activation="tanh")])
        self.decoder = keras.Sequential([keras.Input((3,)), layers.Dense(2)])

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.decoder(self.encoder(x)) - x) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def fit(model, callbacks=(), epochs=2):
    callbacks = [*callbacks, BroadcastGlobalVariablesCallback(0)]
    model.fit(own_rows(), batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks)
    return values_of(model.weights)


def gan(**options):
    keras.utils.set_random_seed(tfscale.rank())
    model = Gan(**options)
    model.compile(*(hvd.DistributedOptimizer(SGD(0.1, momentum=0.9)) for _ in range(2)))
    return model


@sizes(1, 2, 3, timeout_s=120)
def case_a_model_without_call_starts_alike():
    model = gan()
    before = values_of(model.weights)
    after = fit(model)
    require_equal_ranks([*model.weights, *(v for o in model.rules.values() for v in o.variables)])
    kernels = zip(after[::2], before[::2], strict=True)
    assert not any(np.array_equal(*pair) for pair in kernels)


@sizes(2, timeout_s=60)
def case_a_model_without_call_whose_layers_have_no_shapes():
    require_error(lambda: fit(gan(inputs=False)), "It has no call(): build its layers")


@sizes(2, timeout_s=60)
def case_groups_are_those_of_the_compiled_optimizer():
    model = Gan()
    local = {"exchange": tfscale.LocalSGD(2, 2)}
    model.compile(*(hvd.DistributedOptimizer(SGD(0.1), **local) for _ in range(2)))
    require_error(lambda: fit(model), "ConfigError", "LocalSGD must be that of model.optimizer")


@sizes(2, timeout_s=120)
def case_a_model_without_call_is_sharded_and_resumed():
    def trained(callback):
        keras.utils.set_random_seed(tfscale.rank())
        model = Autoencoder()
        rule = keras.optimizers.Adam(0.01)
        model.compile(hvd.DistributedOptimizer(rule, exchange=tfscale.Sharded()))
        weights = fit(model, [callback])
        assert model.optimizer.bound.kept  # it was wired, and its state is shared out
        return weights

    with shared_folder() as folder:
        for make in (
            lambda: BackupAndRestore(folder / "backup", delete_checkpoint=False),
            lambda: Checkpoint(folder / "checkpoint", every_n_epochs=1),
        ):
            whole = trained(make())
            require_identical(trained(make()), whole)
