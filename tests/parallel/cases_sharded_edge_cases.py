"""Sharded where Keras does something else than usual: exclusions, scalars, schedules, float8."""

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format

import tfscale
from tests.helpers.ranks import shared_folder
from tests.helpers.spawn import sizes
from tests.helpers.versions import HAS_MUON
from tests.parallel.cases_equality import float64
from tests.parallel.sharded_model import (
    N_STEPS,
    Adam,
    compiled,
    fit,
    require_near,
    require_state,
    sharded,
    single_steps,
    state_of,
)


@sizes(2, timeout_s=80)
def case_older_files_hold_complete_state():
    """Read as they are: Keras does not restore the optimizer of a Sequential from them."""
    model = compiled(sharded(Adam(0.01)))
    fit(model, 0, N_STEPS)
    state = model.optimizer.full_state()
    with shared_folder() as folder:
        for name in ("model.h5", "model.hdf5"):
            model.save(str(folder / name))  # by the rank that has the state, alone
            tfscale.barrier()
            with h5py.File(folder / name) as file:
                written = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
                pairs = zip(written, state, strict=True)
                assert all(np.array_equal(one, other) for one, other in pairs)
            tfscale.barrier()


@sizes(2, 3, timeout_s=160)
def case_exclusion_from_weight_decay_after_prepare():
    """By variable, by the name of a layer, which pieces do not have, by the name's beginning."""
    with float64():
        for rule in (keras.optimizers.AdamW, *([keras.optimizers.Muon] if HAS_MUON else [])):
            for excluded in (
                lambda kernel: {"var_list": [kernel]},
                lambda kernel: {"var_names": [kernel.path.split("/")[0]]},
                lambda kernel: {"var_names": ["^kernel"]},
            ):
                models = []
                for wrap in (sharded, lambda inner: inner):
                    model = compiled(wrap(rule(0.01, weight_decay=0.3)))
                    if wrap is sharded:
                        tfscale.prepare(model)
                    named = excluded(model.trainable_variables[0])
                    model.optimizer.exclude_from_weight_decay(**named)
                    models.append(model)
                fit(models[0], 0, N_STEPS)
                require_state(models[0], state_of(single_steps(models[1], 0, N_STEPS)))


@sizes(2, timeout_s=80)
def case_a_schedule_in_place_of_a_rate():
    """Set between two fits: the rate is no variable of the optimizer any more."""
    with float64():
        models = [compiled(sharded(Adam(0.01))), compiled(Adam(0.01))]
        fit(models[0], 0, 3)
        single_steps(models[1], 0, 3)
        for model in models:
            model.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(
                0.01, 2, 0.5
            )
            model.make_train_function(force=True)  # Keras itself would continue with the old rate
        start = tfscale.callbacks.BroadcastGlobalVariablesCallback(0)
        fit(models[0], 3, N_STEPS, callbacks=[start])
        require_state(models[0], state_of(single_steps(models[1], 3, N_STEPS)))
        with shared_folder() as folder:
            model = models[0]
            model.save(folder / "model.keras")
            tfscale.barrier()
            again = keras.models.load_model(folder / "model.keras")
            pairs = zip(again.optimizer.variables, model.optimizer.full_state(), strict=True)
            assert all(np.array_equal(v.numpy(), value) for v, value in pairs)
            tfscale.barrier()


class Scale(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x):
        return self.factor * x


def scaled(optimizer):
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(5), Scale(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return model


@sizes(2, timeout_s=120)
def case_numbers_that_are_trained():
    """Rules that need whole variables, a scalar among them: trained, saved, loaded."""
    with float64(), shared_folder() as folder:
        for rule in (keras.optimizers.Lamb, keras.optimizers.Adafactor):
            model, single = scaled(sharded(rule(0.01))), scaled(rule(0.01))
            fit(model, 0, N_STEPS)
            require_state(model, state_of(single_steps(single, 0, N_STEPS)))
            path = folder / f"{rule.__name__}.keras"
            model.save(path)
            tfscale.barrier()
            objects = {"Scale": Scale}
            again = keras.models.load_model(path, custom_objects=objects)
            require_near(state_of(again), state_of(single))
            back = tfscale.load_model(path, custom_objects=objects, exchange=tfscale.Sharded())
            fit(back, 0, 2)
            require_state(back, state_of(single_steps(single, 0, 2)))
            tfscale.barrier()


@sizes(2, timeout_s=60)
def case_gradients_that_are_values():
    """Scales of float8 layers: their gradient is the next value, which no rule may change."""
    with float64():
        kernel = keras.Variable(np.ones((3, 4)), name="kernel")
        scale = keras.Variable(np.ones(1), name="scale")
        scale.overwrite_with_gradient = True
        optimizer = sharded(Adam(0.1))
        optimizer.build([kernel, scale])
        for value in (3.0, 5.0):
            optimizer.apply([tf.ones((3, 4), tf.float64), tf.constant([value], tf.float64)])
            np.testing.assert_allclose(scale.numpy(), [value], rtol=1e-12)
        assert kernel.numpy().max() < 1.0


@sizes(2, timeout_s=80)
def case_cycles_of_an_optimizer_that_was_built_before():
    """As in a loaded model: the state is cut in the first step, and every batch counts."""
    optimizer = Adam(0.01)
    model = compiled(keras.optimizers.SGD())
    optimizer.build(model.trainable_variables)
    wrapped = tfscale.DistributedOptimizer(
        optimizer, exchange=tfscale.Sharded(dense="weights"), backward_passes_per_step=2
    )
    step = tf.function(lambda: wrapped.apply([tf.ones(v.shape) for v in variables], variables))
    variables = model.trainable_variables
    for n in range(1, 6):
        step()
        assert int(wrapped.iterations) == n
