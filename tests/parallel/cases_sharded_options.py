"""Sharded with Keras's and our other options, and the memory of its state."""

import json

import keras
import numpy as np
import tensorflow as tf

import tfscale
from recipes.models.vgg import vgg
from tests.helpers.cases import sizes
from tests.helpers.equality import BATCH
from tests.helpers.ranks import dtype_policy, float64, require_error, shared_folder, values_of
from tests.parallel.sharded_model import (
    N_STEPS,
    Adam,
    alone,
    compiled,
    data,
    fit,
    require_near,
    require_state,
    sharded,
    single_steps,
    state_of,
)
from tfscale.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    CommunicationReport,
)
from tfscale.testing import require_close, require_equal_ranks, require_identical


def own_rows(array, step):
    n = BATCH // tfscale.size()
    begin = step * BATCH + tfscale.rank() * n
    return array[begin : begin + n]


@sizes(2, 3, 4, timeout_s=100)
def case_ways_of_running_steps():
    """run_eagerly, steps_per_execution, train_on_batch, with and without `prepare`."""
    with float64():
        expected = alone(N_STEPS)[1][N_STEPS]
        for options in ({"run_eagerly": True}, {"steps_per_execution": 3}):
            model = compiled(sharded(Adam(0.01)), **options)
            fit(model, 0, N_STEPS)
            require_state(model, expected, options)
        x, y = data()
        for prepare in (tfscale.prepare, lambda model: model):
            model = prepare(compiled(sharded(Adam(0.01))))
            for step in range(N_STEPS):
                model.train_on_batch(own_rows(x, step), own_rows(y, step))
            require_state(model, expected, prepare)


@sizes(2, 3, timeout_s=80)
def case_backward_passes_per_step():
    """Two batches per exchange are one of twice the size."""
    with float64():
        x, y = data()
        rule, exchange = keras.optimizers.SGD, tfscale.Sharded(dense="weights")
        cycles = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
        inner = rule(0.05, momentum=0.9)
        model = compiled(tfscale.DistributedOptimizer(inner, exchange=exchange, **cycles))
        fit(model, 0, N_STEPS)
        single = compiled(rule(0.05, momentum=0.9))
        for step in range(0, N_STEPS, 2):
            rows = slice(step * BATCH, (step + 2) * BATCH)
            single.train_on_batch(x[rows], y[rows])
        assert int(model.optimizer.iterations.numpy()) == N_STEPS
        single.optimizer.iterations.assign(N_STEPS)  # batches, not updates
        require_state(model, state_of(single))
        assert model.optimizer.memory_report()["accumulators"] == 8 * single.count_params()


@sizes(2, 3, timeout_s=80)
def case_frozen_layers():
    def frozen(optimizer):
        model = compiled(optimizer)
        model.layers[1].trainable = False
        model.compile(optimizer, "mse")
        return model

    with float64():
        model = frozen(sharded(Adam(0.01)))
        fit(model, 0, N_STEPS)
        require_state(model, state_of(single_steps(frozen(Adam(0.01)))))


@sizes(2, 3, timeout_s=80)
def case_two_optimizers():
    """Each has a layer; the callback of rank 0 saves the state of both."""
    with float64(), shared_folder() as folder:
        keras.utils.set_random_seed(3)
        single, model = TwoOptimizers(), TwoOptimizers()
        for each, wrap in ((single, lambda o: o), (model, sharded)):
            each.set_weights(single.get_weights())
            each.compile(wrap(Adam(0.01)), "mse")
            each.second = wrap(keras.optimizers.SGD(0.02, momentum=0.9))
        single_steps(single)
        path = str(folder / "two.weights.h5")
        saver = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        fit(model, 0, N_STEPS, [saver] if tfscale.rank() == 0 else [])
        expected = values_of(single.second.variables)
        require_near(values_of(model.variables), values_of(single.variables))
        require_near(model.optimizer.full_state(), values_of(single.optimizer.variables))
        require_near(model.second.full_state(), expected)
        if tfscale.rank() == 0:
            for variable in single.second.variables:
                variable.assign(tf.zeros_like(variable.value))
            single.load_weights(path)
            require_near(values_of(single.second.variables), expected)


@sizes(2, timeout_s=80)
def case_two_optimizers_resume():
    """Their parts are cut when they are built, in the first step or by the checkpoint."""
    with float64(), shared_folder() as folder:

        def train(name, epochs):
            keras.utils.set_random_seed(3)
            model = TwoOptimizers()
            model.compile(sharded(Adam(0.01)), "mse")
            model.second = sharded(keras.optimizers.SGD(0.02, momentum=0.9))
            backup = BackupAndRestore(folder / name, delete_checkpoint=False)
            fit(model, 0, N_STEPS, [backup], epochs=epochs)
            state = [*model.optimizer.full_state(), *model.second.full_state()]
            return [*values_of(model.variables), *state]

        train("cut", 1)
        require_identical(train("cut", 2), train("whole", 2))


@sizes(2, timeout_s=80)
def case_two_optimizers_of_the_same_variables_are_refused():
    model = TwoOptimizers()
    model.compile(sharded(Adam(0.01)), "mse")
    model.optimizer.build(model.trainable_variables)
    model.second = sharded(keras.optimizers.SGD(0.02))
    model.second.build(model.trainable_variables)
    require_error(lambda: fit(model, 0, 1), "must belong to one sharded optimizer")


@keras.saving.register_keras_serializable("tests")
class TwoOptimizers(keras.Model):
    def __init__(self):
        super().__init__()
        self.first_layer = keras.layers.Dense(5, activation="tanh")
        self.last_layer = keras.layers.Dense(3)
        self(np.zeros((1, 6)))

    def call(self, inputs):
        return self.last_layer(self.first_layer(inputs))

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - self(x, training=True)) ** 2)
        groups = (self.first_layer.trainable_variables, self.last_layer.trainable_variables)
        for optimizer, variables, gradients in zip(
            (self.optimizer, self.second), groups, tape.gradient(loss, groups), strict=True
        ):
            optimizer.apply(gradients, variables)
        return {"loss": loss}


@sizes(2, 3, timeout_s=80)
def case_local_variables():
    """`register_local_var` and local layers: whole on each rank, and in complete state."""
    with float64():
        for way in ("variable", "layer"):
            model = compiled(None)
            layer = model.layers[-1]
            if way == "layer":
                optimizer = tfscale.PartialDistributedOptimizer(
                    Adam(0.01), local_layers=layer, exchange=tfscale.Sharded()
                )
            else:
                optimizer = sharded(Adam(0.01))
                for variable in layer.trainable_variables:
                    optimizer.register_local_var(variable)
            model.compile(optimizer, "mse")
            fit(model, 0, 3)
            others = tfscale.allgather_object(layer.get_weights()[0])
            assert not np.array_equal(others[0], others[1]), way
            require_equal_ranks([w for o in model.layers[:-1] for w in o.trainable_variables])
            plain = Adam(0.01)
            plain.build(model.trainable_variables)
            shapes = [tuple(a.shape) for a in optimizer.full_state()]
            assert shapes == [tuple(v.shape) for v in plain.variables], way


@sizes(3, timeout_s=80)
def case_process_set():
    """Two of three ranks share; the third trains alone."""
    with float64():
        pair = tfscale.add_process_set([0, 2])
        x, y = data()
        optimizer = sharded(Adam(0.01), process_set=pair)
        model = tfscale.prepare(compiled(optimizer))
        n = BATCH // 2 if pair.included() else BATCH
        for step in range(N_STEPS):
            begin = step * BATCH + n * max(pair.rank(), 0)
            model.train_on_batch(x[begin : begin + n], y[begin : begin + n])
        assert bool(optimizer.bound.kept) == pair.included()
        with shared_folder() as folder:
            if pair.included():
                model.save(folder / "pair.keras")
                assert (folder / "pair.keras").exists()
        require_state(model, alone(N_STEPS)[1][N_STEPS])
        tfscale.remove_process_set(pair)


@sizes(2, 4, timeout_s=80)
def case_compression_is_as_with_allreduce():
    """Gradients are rounded in the same way; parameters come near what their owners have."""
    results = []
    for exchange in (tfscale.Sharded(dense="weights"), "allreduce"):
        rule, fp16 = keras.optimizers.SGD(0.05, momentum=0.9), tfscale.Compression.fp16
        optimizer = tfscale.DistributedOptimizer(rule, compression=fp16, exchange=exchange)
        model = compiled(optimizer)
        fit(model, 0, N_STEPS)
        require_equal_ranks(model.variables)
        results.append(values_of(model.variables))
    require_close(*results, atol=1e-4)  # forward passes see changes in 16 bits


LSO = keras.optimizers.LossScaleOptimizer


@sizes(2, 4, timeout_s=80)
def case_memory_is_reported():
    """Under loss scaling, accumulation and moving averages; in files of the run, too."""
    options = {"gradient_accumulation_steps": 2, "use_ema": True}
    with shared_folder() as folder:
        for inner in (Adam(0.01, **options), LSO(Adam(0.01, **options))):
            model = compiled(sharded(inner))
            tfscale.prepare(model)
            plain = type(inner).from_config(inner.get_config())
            plain.build(model.trainable_variables)
            expected = sum(v.numpy().nbytes for v in plain.variables)
            report = model.optimizer.memory_report()
            assert report["complete_state"] == expected
            every = tfscale.allgather_object(report)
            n_shared = sum(v.numpy().nbytes for v in plain.variables if v.shape == ())
            total = sum(r["state"] for r in every) - (tfscale.size() - 1) * n_shared
            assert total == expected, (every, expected)
            parameters = sum(v.numpy().nbytes for v in model.trainable_variables)
            assert sum(r["parameters"] for r in every) == parameters
        fit(model, 0, N_STEPS, [BroadcastGlobalVariablesCallback(0), CommunicationReport(folder)])
        tfscale.barrier()
        if tfscale.rank() == 0:
            lines = (folder / "communication.jsonl").read_text().splitlines()
            (memory,) = [row for row in map(json.loads, lines) if row["kind"] == "memory"]
            assert memory["state"] == [r["state"] for r in every]
            assert memory["complete_state"] == expected
            assert "Optimizer state" in (folder / "communication.md").read_text()


@sizes(4, timeout_s=100)
def case_memory_of_vgg():
    """Adam on VGG-A at 64x64: at most 0.27 of the state of one process on each of 4 ranks."""
    model = vgg(input_shape=(64, 64, 3))
    model.compile(sharded(Adam(0.01)), "mse")
    tfscale.prepare(model)
    report = model.optimizer.memory_report()
    assert report["complete_state"] >= 8 * model.count_params()
    shares = tfscale.allgather_object(report["state"] / report["complete_state"])
    assert max(shares) <= 0.27, shares


@sizes(2, 3, 4, timeout_s=100)
def case_all_ranks_skip_a_step_that_is_infinite_on_one():
    """Gradients in float16 overflow for large errors; a step that is whole changes all."""
    x, y = (own_rows(values, 0) for values in data())
    bad = np.array(y)
    if tfscale.rank() == tfscale.size() - 1:
        bad[0, 0] = np.inf
    for policy in ("mixed_float16", "mixed_bfloat16"):
        inner = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer = sharded(LSO(inner, initial_scale=1024.0, dynamic_growth_steps=3))
        with dtype_policy(policy):
            model = tfscale.prepare(compiled(optimizer, auto_scale_loss=False))

        def trained(optimizer=optimizer, model=model):
            momentums = [v for v in optimizer.full_state() if v.ndim]
            return [*values_of(model.trainable_variables), *momentums]

        before = trained()
        for n, (scale, targets) in enumerate(((512.0, bad), (512.0, y), (256.0, bad))):
            model.train_on_batch(x, targets)
            scales = tfscale.allgather_object(float(optimizer.dynamic_scale.numpy()))
            assert scales == [scale] * tfscale.size(), (policy, scales)
            assert int(optimizer.iterations.numpy()) == (n > 0)
            after = trained()
            unchanged = [np.array_equal(*pair) for pair in zip(before, after, strict=True)]
            assert all(unchanged) if targets is bad else not any(unchanged)
            before = after
            require_equal_ranks([tf.Variable(a) for a in after])
