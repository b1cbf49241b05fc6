"""NaN on one rank: all ranks skip the step, or all raise with rank, step and parameter."""

import keras

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.equality import BATCH
from tests.helpers.ranks import float64, outcome, require_error
from tests.parallel.nonfinite_data import BAD, data
from tests.parallel.sharded_model import N_STEPS, compiled, single_steps, state_of
from tfscale import Allreduce, Chunked, DistributedOptimizer, LocalSGD, Sharded
from tfscale.callbacks import BroadcastGlobalVariablesCallback
from tfscale.testing import require_close, require_equal_ranks, require_identical

EXCHANGES = {
    "allreduce": Allreduce(bucket_mb=0),
    "chunked": Chunked(first_chunk_layers=1, replicated_dense=0),
    "dense": Chunked(replicated_dense=1),
    "replicated": Chunked(replicated_dense=2),
    "sharded": Sharded(dense="weights"),
    "partial": Sharded(dense="partial"),
}


def fit(optimizer, **options):
    x, _, y = data()
    model = compiled(optimizer, **options)
    batches = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
    model.fit(batches, verbose=0, callbacks=[BroadcastGlobalVariablesCallback(0)])
    return model


def check_skipped(names, **options):
    """Training has continued without the bad step, exactly as one process without it."""
    with float64():
        alone = single_steps(compiled(keras.optimizers.Adam(0.01)), 0, BAD)
        expected = state_of(single_steps(alone, BAD + 1))
        for name in names:
            inner = keras.optimizers.Adam(0.01, global_clipnorm=1e6)
            optimizer = DistributedOptimizer(inner, exchange=EXCHANGES[name], nonfinite="skip")
            model = fit(optimizer, **options)
            assert optimizer.n_skipped_steps == 1, name
            assert int(optimizer.iterations) == N_STEPS - 1, name
            require_equal_ranks(model.variables)
            mine = [*(v.numpy() for v in model.variables), *optimizer.full_state()]
            require_close(mine, expected, message=name)


@sizes(1, 2, 3, timeout_s=240)
def case_skipped_on_all_ranks():
    check_skipped(["allreduce", "chunked", *["dense", "sharded", "partial"] * (tfscale.size() > 1)])
    if tfscale.size() == 2:
        check_skipped(["allreduce", "sharded"], run_eagerly=True)


@sizes(2, 3, timeout_s=180)
def case_raised_on_every_rank():
    bad_rank = tfscale.size() - 1
    for name, exchange in EXCHANGES.items():
        inner = keras.optimizers.Adam(0.01)
        optimizer = DistributedOptimizer(inner, exchange=exchange, nonfinite="raise")
        # Each rank tells its own layers' names: count them again, whatever models came before.
        keras.utils.clear_session()
        texts = tfscale.allgather_object(outcome(lambda chosen=optimizer: fit(chosen)))
        assert len(set(texts)) == 1, (name, texts)
        start = "ExchangeError: gradients must be finite. Received: NaN or infinity in step 3, on "
        assert texts[0].startswith(start), (name, texts[0])
        # Where all dense layers exchange activations no rank can be named.
        if name != "partial":
            assert f"on rank {bad_rank} in dense" in texts[0], (name, texts[0])


@sizes(2, 4, timeout_s=120)
def case_a_group_of_local_sgd_skips_alone():
    """The other group takes its step, and both still average together."""
    with float64():
        optimizer = DistributedOptimizer(
            keras.optimizers.SGD(0.1), exchange=LocalSGD(groups=2, interval=2), nonfinite="skip"
        )
        model = fit(optimizer)
        group, n = tfscale.rank() // (tfscale.size() // 2), BATCH // 2
        _, x, y = data()
        reference = compiled(keras.optimizers.SGD(0.1))
        for step in range(N_STEPS):
            rows = slice(step * BATCH + group * n, step * BATCH + (group + 1) * n)
            if (step, group) != (BAD, 1):
                reference.train_on_batch(x[rows], y[rows])
            if step % 2:  # where an interval ends
                for variable in reference.variables:
                    variable.assign(tfscale.allreduce(variable.value))
        assert optimizer.n_skipped_steps == group
        assert int(optimizer.iterations) == N_STEPS - group
        require_close(model.variables, reference.variables)


@sizes(2, 3)
def case_local_variables_and_passes():
    """A variable that is not exchanged tells the others too; so does a cycle of batches."""
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(0.1), nonfinite="skip", backward_passes_per_step=N_STEPS
    )
    model = compiled(optimizer)
    before = [v.numpy() for v in model.variables]
    x, _, y = data()
    optimizer.register_local_var(model.trainable_variables[0])
    batches = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
    model.fit(batches, verbose=0, callbacks=[tfscale.callbacks.Callback()])
    assert optimizer.n_skipped_steps == 1
    require_identical(model.variables, before)


@sizes(2)
def case_loss_scaling_tries_scales_itself():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer = DistributedOptimizer(scaled, nonfinite="raise")
    require_error(lambda: fit(optimizer), "nonfinite='raise' would stop")
