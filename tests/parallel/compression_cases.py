"""Lossy compressions: nothing is lost over the steps, ranks stay equal, few bytes are sent.

Run by test_compression.py on several layouts of hosts.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import StopAt, dtype_policy, require_error, shared_folder, values_of
from tests.parallel.checkpoint_runs import forget_after
from tfscale import Compression, DistributedOptimizer
from tfscale.callbacks import Checkpoint
from tfscale.checkpoints import list_checkpoints
from tfscale.testing import inspect, require_equal_ranks, require_identical

SGD = keras.optimizers.SGD
SHAPES = ((40, 70), (3, 3, 16, 24), (70,), (5, 5))  # the last two are not compressed
LOW_RANK = Compression.low_rank(rank=3, start_step=0)
KINDS = {"int8": Compression.int8, "int4": Compression.int4(start_step=0), "low_rank": LOW_RANK}
FLOATS = 40 * 70 + 3 * 3 * 16 * 24  # of the compressed ones
FACTORS = 3 * (40 + 70 + 3 * 3 * 16 + 24)  # of rank 3


def new_variables(seed=0):
    rng = np.random.default_rng(seed)
    return [
        keras.Variable(rng.normal(size=shape).astype("float32"), name=f"w{i}")
        for i, shape in enumerate(SHAPES)
    ]


def own_gradients(step, rank=None, scale=1.0):
    rank = tfscale.rank() if rank is None else rank
    rng = np.random.default_rng([step, rank])
    return [scale * rng.normal(size=shape).astype("float32") for shape in SHAPES]


def mean_gradients(step):
    every = [own_gradients(step, rank) for rank in range(tfscale.size())]
    return [np.mean([np.float64(g) for g in column], 0) for column in zip(*every, strict=True)]


def train(optimizer, variables, steps, is_traced=True, gradients=own_gradients):
    def step(*grads):
        optimizer.apply(list(grads), variables)

    run = tf.function(step) if is_traced else step
    for number in steps:
        run(*map(tf.constant, gradients(number)))
    return variables


def require_near_masters(optimizer, variables, bound):
    """Require variables that lack a little of what the owners have, and none for a bound of 0."""
    shards, far = optimizer.bound.executor.shards, 0.0
    for i, piece in shards.pieces.items():
        gap = np.abs(np.float64(piece.numpy()) - shards.part(i, variables[i].numpy()))
        far = max(far, gap.max(initial=0.0))
        assert math.prod(variables[i].shape) >= 1024 or not gap.any()  # small ones are sent as is
    every = tfscale.allgather_object(far)
    assert max(every) <= bound and (max(every) > 0 or not bound), every


def pending(optimizer, variables, residuals=None):
    """Return the sum that is not applied yet, of each variable; in units of the mean."""
    totals = []
    for v in variables[:2] if tfscale.size() > 1 else ():
        (kept,) = [
            r for r in (residuals or optimizer.bound.executor.residuals).all if r.parameter is v
        ]
        own = tfscale.allreduce(kept.own, op=tfscale.Average)
        owner = 0.0 if kept.owner is None else np.reshape(tfscale.allgather(kept.owner), own.shape)
        totals.append(np.float64(own) + owner)
    return [*totals, 0.0, 0.0, 0.0, 0.0][:4]


def require_sums(before, variables, rest, steps, atol):
    """With a rate of 1, what was applied and what is pending add up to the means of all ranks."""
    expected = [sum(column) for column in zip(*map(mean_gradients, steps), strict=True)]
    for v, w, e, r in zip(variables, before, expected, rest, strict=True):
        np.testing.assert_allclose(np.float64(w) - v.numpy() + r, e, atol=atol)


def of_several_ranks(case):
    return case if tfscale.size() > 1 else lambda: None


def case_sums_over_steps_are_those_of_all_gradients():
    sharded = [{"exchange": tfscale.Sharded(mb, dense="weights")} for mb in (0, "auto")]
    for kind, compression in KINDS.items():
        more = sharded if kind != "low_rank" else []
        for options in ({"exchange": tfscale.Allreduce(bucket_mb=0)}, {"num_groups": 1}, *more):
            optimizer = DistributedOptimizer(SGD(1.0), compression=compression, **options)
            variables = new_variables()
            before = values_of(variables)
            train(optimizer, variables, range(20))
            require_equal_ranks(variables)
            if options in more and tfscale.size() > 1:
                require_near_masters(optimizer, variables, {"int8": 0.05, "int4": 1.0}[kind])
                optimizer.full_state()  # from now on variables hold what the owners have
                require_near_masters(optimizer, variables, 0.0)
            rest = pending(optimizer, variables)
            require_sums(before, variables, rest, range(20), 3e-5)
            if tfscale.size() > 1:  # the pending sum is no more than what one step rounds off,
                # and of matrices without a low rank no more than the sum itself
                bound = {"int8": 0.05, "int4": 0.8, "low_rank": 60.0}[kind]
                assert 0 < max(np.abs(r).max() for r in rest[:2]) < bound


def case_results_depend_neither_on_buckets_nor_on_mode_nor_on_chance():
    for compression in (Compression.int8, Compression.low_rank(start_step=2)):
        runs = []
        for is_traced, options in (
            (True, {"exchange": tfscale.Allreduce(bucket_mb=0)}),
            (True, {"exchange": tfscale.Chunked(first_chunk_layers=1)}),
            (True, {"num_groups": 1}),
            (False, {}),
        ):
            optimizer = DistributedOptimizer(SGD(0.1), compression=compression, **options)
            runs.append(values_of(train(optimizer, new_variables(), range(5), is_traced)))
        for run in runs[1:]:
            require_identical(run, runs[0])


def case_gradients_of_low_rank_are_exact():
    """From the first step on, up to the rank of the factors."""

    def gradients(columns, step):
        own = np.random.default_rng([step, tfscale.rank()])
        made = []
        for shape in SHAPES:
            common = np.random.default_rng([columns, 2])
            left = common.normal(size=(math.prod(shape[:-1]), columns))
            right = common.normal(size=(columns, shape[-1]))
            inside = np.eye(columns) + 0.3 * own.normal(size=(columns, columns))
            made.append(np.float32((left @ inside @ right).reshape(shape)))
        return made

    for columns in (2, 3):
        optimizer = DistributedOptimizer(SGD(1.0), compression=LOW_RANK)
        variables = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
        for step in range(3):
            before = values_of(variables)
            train(optimizer, variables, [step], gradients=partial(gradients, columns))
            every = zip(*tfscale.allgather_object(gradients(columns, step)), strict=True)
            for v, w, column in zip(variables, before, every, strict=True):
                mean = np.mean(np.float64(column), 0)
                np.testing.assert_allclose(w - v.numpy(), mean, atol=2e-6 * np.abs(mean).max())
        require_equal_ranks(variables)


def case_one_rank_is_plain_keras():
    if tfscale.size() > 1:
        return
    plain = train(SGD(0.1), new_variables(), range(3))
    optimizer = DistributedOptimizer(SGD(0.1), compression=Compression.int8)
    require_identical(train(optimizer, new_variables(), range(3)), plain)


def case_equal_integers_and_zeros_are_exact():
    def integers(step):
        rng = np.random.default_rng(step)
        grads = [rng.integers(-127, 128, size=shape).astype("float32") for shape in SHAPES]
        for g in grads:
            g.flat[::16] = 127  # the largest of every block
        return grads

    for gradients in (integers, lambda step: [np.zeros(s, "float32") for s in SHAPES]):
        optimizer = DistributedOptimizer(SGD(1.0), compression=Compression.int8)
        variables = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
        train(optimizer, variables, [0], gradients=gradients)
        require_identical(variables, [-g for g in gradients(0)])


@of_several_ranks
def case_a_gradient_that_is_not_finite_is_skipped_with_its_residuals():
    def gradients(step):
        grads = own_gradients(step)
        if step == 3 and tfscale.rank() == tfscale.size() - 1:
            grads[1][0, 0, 0, 0] = np.nan
        return grads

    for compression in (LOW_RANK, Compression.int8):
        optimizer = DistributedOptimizer(SGD(0.1), compression=compression, nonfinite="skip")
        variables = new_variables()
        train(optimizer, variables, range(3), gradients=gradients)
        before = values_of([*variables, *optimizer.bound.executor.residuals.variables])
        train(optimizer, variables, [3], gradients=gradients)
        require_identical([*variables, *optimizer.bound.executor.residuals.variables], before)
        # As if the step had not been.
        train(optimizer, variables, [4], gradients=gradients)
        other = DistributedOptimizer(SGD(0.1), compression=compression)
        require_identical(variables, train(other, new_variables(), [0, 1, 2, 4]))
    # Without a policy the whole block is NaN, on all ranks.
    for exchange in ("allreduce", tfscale.Sharded(bucket_mb=0, dense="weights")):
        options = {"compression": compression, "exchange": exchange}
        other = DistributedOptimizer(SGD(0.1), **options, nonfinite="ignore")
        w = train(other, new_variables(), [3], gradients=gradients)[1].numpy()
        assert np.isnan(w.flat[:256]).all() and np.isfinite(w.flat[256:]).all()
        require_equal_ranks([tf.constant(w)])
        # A skipped step changes nothing that an owner has; what is not sent yet is sent.
        found = []
        for steps in ([0, 1, 3, 4], [0, 1, 4]):
            other = DistributedOptimizer(SGD(0.1), **options, nonfinite="skip")
            found.append(train(other, new_variables(), steps, gradients=gradients))
            require_equal_ranks(found[-1])
            other.full_state()
        require_identical(*found)


@of_several_ranks
def case_residuals_follow_the_scale_of_the_loss():
    for compression in (Compression.int8, LOW_RANK):
        scaled = keras.optimizers.LossScaleOptimizer(SGD(1.0), initial_scale=8.0)
        scaled.dynamic_growth_steps = 2
        optimizer = DistributedOptimizer(scaled, compression=compression)
        variables = new_variables()
        before = values_of(variables)

        def gradients(step, scaled=scaled):
            grads = own_gradients(step, scale=float(scaled.dynamic_scale) if scaled.built else 8.0)
            if step == 2 and tfscale.rank() == 0:
                grads[0][1, 1] = np.inf
            return grads

        train(optimizer, variables, range(5), gradients=gradients)
        assert float(scaled.dynamic_scale) == 16.0  # 8, 8, 16 and halved, 8, 8, 16
        rest = [r / 16.0 for r in pending(optimizer, variables)]
        require_sums(before, variables, rest, [0, 1, 3, 4], 1e-5)


@of_several_ranks
def case_only_exchanged_sums_are_compressed():
    owned = 4 * FLOATS // tfscale.size()
    of_kind = {"int8": (0, owned + 2048), "low_rank": (4 * 3 * 184, 4 * 3 * 184)}  # Q: 40 and 144
    for kind, (least, most) in of_kind.items():
        options = {"compression": KINDS[kind], "backward_passes_per_step": 2}
        optimizer = DistributedOptimizer(SGD(1.0), **options)
        variables = new_variables()
        before = values_of(variables)
        train(optimizer, variables, range(4))
        kept = values_of(optimizer.bound.executor.residuals.variables)
        train(optimizer, variables, [4])  # exchanges nothing
        require_identical(optimizer.bound.executor.residuals.variables, kept)
        require_sums(before, variables, pending(optimizer, variables), range(4), 1e-5)
        assert least <= optimizer.memory_report()["residuals"] - 4 * FLOATS <= most
    optimizer = DistributedOptimizer(SGD(0.1), compression=Compression.int8(error_feedback=False))
    train(optimizer, new_variables(), range(2))
    assert optimizer.memory_report()["residuals"] == 0


def sent_bytes(optimizer, variables, steps, **options):
    inspect.take_collectives()
    train(optimizer, variables, steps, **options)
    sent = [e for e in inspect.take_collectives() if e.plan >= 0]
    return sum(e.bytes for e in sent if "w2" not in e.name)


@of_several_ranks
def case_bytes_are_few_from_the_step_on_at_which_bits_are():
    n_bytes = 4 * FLOATS
    optimizer = DistributedOptimizer(SGD(0.1), compression=Compression.int8)
    assert sent_bytes(optimizer, new_variables(), [0]) <= 0.26 * n_bytes
    # Both halves of an exchange with sharded parameters.
    sent = {}
    for name in ("none", "bf16", "fp16", "int8"):
        few, exchange = getattr(Compression, name), tfscale.Sharded(dense="weights")
        optimizer = DistributedOptimizer(SGD(0.1), compression=few, exchange=exchange)
        kernels = {"gradients": lambda step: own_gradients(step)[:2]}
        sent[name] = sent_bytes(optimizer, new_variables()[:2], [0], **kernels)
    assert sent["none"] == 2 * n_bytes and sent["bf16"] == sent["fp16"] == n_bytes, sent
    assert sent["int8"] <= 0.26 * sent["none"], sent
    share = FACTORS / FLOATS
    for compression, first, least, most in (
        (Compression.int4(start_step=2), 0.5, 0.125, 0.14),
        (Compression.low_rank(rank=3, start_step=2), 1.0, share, share),
    ):
        optimizer = DistributedOptimizer(SGD(0.1), compression=compression)
        variables = new_variables()
        sent = [sent_bytes(optimizer, variables, [step]) / n_bytes for step in range(4)]
        assert sent[:2] == [first, first] and least <= min(sent[2:]) <= max(sent[2:]) <= most, sent


@of_several_ranks
def case_int4_begins_after_a_twentieth_of_the_steps():
    """Of a fit of 20000, that ends after its first epoch."""
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(70)])
    model.compile(DistributedOptimizer(SGD(0.1), compression=Compression.int4), "mse")
    x, y = np.ones((8, 40), "float32"), np.ones((8, 70), "float32")
    callbacks = [tfscale.callbacks.Synchronize(), StopAt(epoch=0, rank=tfscale.rank())]
    model.fit(x, y, epochs=10000, batch_size=4, verbose=0, callbacks=callbacks)
    residuals = model.optimizer.bound.executor.residuals
    assert [int(v) for v in (residuals.n_steps, residuals._start)] == [2, 1000]


@of_several_ranks
def case_what_cannot_be_quantised_is_refused():
    few, local = Compression.int8, tfscale.LocalSGD(1, 2, overlap=1)
    zeros, tape = tf.zeros((64, 64), tf.float64), tf.GradientTape()
    with dtype_policy("float64"):
        variable = keras.Variable(zeros, dtype="float64")
    made = partial(DistributedOptimizer, SGD(0.1))
    for action, text in (
        (
            lambda: made(compression=few).apply([zeros], [variable]),
            "ConfigError: Compression.int8 is for float32. Received: a gradient of float64.",
        ),
        (
            lambda: tfscale.allreduce(tf.zeros((64, 64)), compression=few),
            "ConfigError: Compression.int8 needs residuals that",
        ),
        *(
            (partial(tfscale.DistributedGradientTape, tape, compression=c), f"{name} for a tape")
            for c, name in ((few, "Compression.int8"), (LOW_RANK, "Received: Compression.low_rank"))
        ),
        *(
            (
                partial(made, compression=Compression.sparse, exchange=exchange),
                "ConfigError: Compression.sparse is for averages of LocalSGD",
            )
            for exchange in ("allreduce", "sharded", "chunked", "auto")
        ),
        (
            partial(tfscale.DistributedGradientTape, tape, compression=Compression.sparse),
            "Received: Compression.sparse for a tape",
        ),
        *(
            (partial(made, compression=Compression.sparse, exchange=exchange), text)
            for exchange, text in (
                (tfscale.LocalSGD(1, average="gradients"), "needs averages of parameters"),
                (tfscale.LocalSGD(1, average_state=True), "needs averages of parameters"),
                (
                    tfscale.LocalSGD(1, tfscale.DistanceGuard(1.0)),
                    "an interval that is counted in steps",
                ),
            )
        ),
        *(
            (
                partial(made, compression=Compression.low_rank, exchange=exchange),
                "Received: Compression.low_rank",
            )
            for exchange in ("sharded", "auto", local)
        ),
        (lambda: Compression.int4(error_feedback=False), "error_feedback must be True for 4 bits"),
        (lambda: Compression.int8(steps=3), "Received: steps."),
    ):
        require_error(action, text)


def case_gathers_of_changes_leave_ranks_equal_whatever_their_timing():
    """1000 steps that end before the parameters have arrived."""
    if (tfscale.size(), os.environ["TFSCALE_RANKS_PER_HOST"]) != (3, "1"):
        return
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(48, "tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input((32,)), *layers])
    options = {"compression": Compression.int8, "exchange": tfscale.Sharded(0, dense="weights")}
    model.compile(DistributedOptimizer(SGD(0.05), **options), "mse", jit_compile=False)
    tfscale.prepare(model)
    rng = np.random.default_rng(tfscale.rank())
    x, y = np.float32(rng.normal(size=(2, 4, 32))), np.float32(rng.normal(size=(2, 4, 48)))
    for step in range(1000):
        if rng.random() < 0.1:
            time.sleep(0.01 * rng.random())  # ranks post and read at different times
        model.train_on_batch(x[step % 2], y[step % 2])
        if step % 100 == 99:
            require_equal_ranks(model.trainable_variables)
    require_near_masters(model.optimizer, model.trainable_variables, 1e-3)


@of_several_ranks
def case_saves_and_assignments_keep_what_owners_have():
    """Files and the end of `fit` have exact weights; a broadcast of equal ones loses nothing."""
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(70)])
    options = {"compression": Compression.int4(start_step=0), "exchange": "sharded"}
    optimizer = DistributedOptimizer(SGD(0.1), **options)
    model.compile(optimizer, "mse", jit_compile=False)
    tfscale.broadcast_variables(model.variables, 0)
    tfscale.prepare(model)
    rng = np.random.default_rng(tfscale.rank())
    x, y = np.float32(rng.normal(size=(8, 40))), np.float32(rng.normal(size=(8, 70)))

    def train_again():
        for _ in range(3):
            model.train_on_batch(x, y)
        require_near_masters(optimizer, model.trainable_variables, 1.0)

    train_again()
    own = values_of(optimizer.bound.executor.shards.pieces.values())
    tfscale.broadcast_variables(model.variables, 0)
    model.set_weights(model.get_weights())
    require_identical(optimizer.bound.executor.shards.pieces.values(), own)
    with shared_folder() as folder:
        model.save_weights(folder / "some.weights.h5")
        tfscale.barrier()
        require_near_masters(optimizer, model.trainable_variables, 0.0)
        plain = keras.Sequential([keras.Input((40,)), keras.layers.Dense(70)])
        plain.load_weights(folder / "some.weights.h5")
        require_identical(plain.variables, model.variables)
    train_again()
    model.fit(x, y, batch_size=4, verbose=0)
    require_near_masters(optimizer, model.trainable_variables, 0.0)
    train_again()
    model.set_weights([w + 1 for w in model.get_weights()])
    require_near_masters(optimizer, model.trainable_variables, 0.0)


@of_several_ranks
def case_averages_of_groups_in_few_bits_lose_nothing():
    """With a learning rate of 1, common weights and what is pending add up to all gradients."""
    for kind in ("int8", "int4"):
        for average in ("parameters", "gradients"):
            within = tfscale.Sharded(dense="weights")
            local = tfscale.LocalSGD(tfscale.size(), 2, average=average, within=within)
            optimizer = DistributedOptimizer(SGD(1.0), compression=KINDS[kind], exchange=local)
            variables = new_variables()
            before = values_of(variables)
            optimizer.build(variables)
            train(optimizer, variables, range(8))
            require_equal_ranks(variables)
            residuals = optimizer.bound.average.residuals
            rest = pending(optimizer, variables, residuals)
            assert all(0 < np.abs(r).max() < 3.0 for r in rest[:2])
            sign = 1.0 if average == "gradients" else -1.0  # changes are against the gradients
            require_sums(before, variables, [sign * r for r in rest], range(8), 3e-5)
            share = sent_bytes(optimizer, variables, range(8, 10)) / (4 * FLOATS)
            assert 0.125 < share < {"int8": 0.28, "int4": 0.16}[kind], share
            owned = 4 * FLOATS // tfscale.size()
            assert 4 * FLOATS < optimizer.memory_report()["residuals"] <= 4 * FLOATS + owned + 2048
            optimizer.bound.average.start_from_here()
            assert not any(v.numpy().any() for v in residuals.variables)


SPARSE = Compression.sparse(share=0.1, chunk=1024, decay=1.0)


def with_averages(compression, within="allreduce", rate=1.0, **options):
    """Return an optimizer of groups of one rank, built on new variables, and these."""
    local = tfscale.LocalSGD(tfscale.size(), 4, within, **options)
    optimizer = DistributedOptimizer(SGD(rate), compression=compression, exchange=local)
    variables = new_variables()
    optimizer.build(variables)
    return optimizer, variables


def means_of(variables):
    return [tf.constant(tfscale.allreduce(v.value, op=tfscale.Average)) for v in variables]


@of_several_ranks
def case_averages_that_overlap_lose_nothing():
    """Mean weights and what is pending add up to all gradients, after each merge."""
    for compression in (Compression.int8, KINDS["int4"], SPARSE):
        results = []
        for options in (
            {},
            {"overlap": 1},
            {"fragments": 2, "overlap": 1, "within": tfscale.Sharded(dense="weights")},
        ):
            optimizer, variables = with_averages(compression, **options)
            before, average = values_of(variables), optimizer.bound.average
            for begin, end in ((0, 5), (5, 9), (9, 13)):  # one step after each average
                is_traced = begin > 0 or compression is not SPARSE
                train(optimizer, variables, range(begin, end), is_traced)
                assert len(average.variables) > 4  # they wait for what is under way
                rest = pending(optimizer, variables, average.residuals)
                require_sums(before, means_of(variables), [-r for r in rest], range(end), 5e-5)
                assert all(0 < np.abs(r).max() < 12.0 for r in rest[:2])
            report = optimizer.memory_report()["residuals"]
            assert report >= 4 * FLOATS and len(average.residuals.all) == 2
            results.append(values_of([r.own for r in average.residuals.all]))
        # The same changes are sent, whether steps wait for averages or not, up to rounding.
        for mine, other in zip(*results[:2], strict=True):
            np.testing.assert_allclose(mine, other, atol=2e-5)


@of_several_ranks
def case_a_change_that_is_not_finite_keeps_its_residual():
    """All ranks get NaN of its chunk, and what was pending of the others is sent as before."""
    optimizer, variables = with_averages(SPARSE, overlap=1)

    def gradients(step):
        grads = own_gradients(step)
        if step == 7 and tfscale.rank() == tfscale.size() - 1:
            grads[1][0, 0, 0, 0] = np.inf
        return grads

    train(optimizer, variables, range(7), gradients=gradients)
    residual = optimizer.bound.average.residuals.find(variables[1])
    before = residual.own.numpy().reshape(-1)
    train(optimizer, variables, (7, 8), gradients=gradients)
    after, means = residual.own.numpy().reshape(-1), variables[1].numpy().reshape(-1)
    assert np.isnan(means[:1024]).all() and np.isfinite(means[1024:]).all()
    last = tfscale.rank() == tfscale.size() - 1
    if last and int(os.environ["TFSCALE_RANKS_PER_HOST"]) == 1:
        np.testing.assert_array_equal(after[:1024], before[:1024])
    assert np.isfinite(after).all()


@of_several_ranks
def case_bytes_of_sparse_averages_are_the_formula():
    """Of one average: the codes, and float32 of what is sent whole."""
    optimizer, variables = with_averages(Compression.sparse, overlap=1)
    inspect.take_collectives()
    train(optimizer, variables, range(4))
    assert optimizer.bound.average.variables  # nothing is under way
    sent = [e.bytes for e in inspect.take_collectives() if "posted average" in e.name]
    whole = 4 * sum(math.prod(shape) for shape in SHAPES[2:])
    formula = sum(Compression.sparse.n_bytes(math.prod(shape)) for shape in SHAPES[:2])
    # 1/64 of 2800 and of 3456 are 44 and 54 values, of 14 bits.
    assert sum(sent) == whole + formula and formula == (4 + 66 + 11) + (4 + 81 + 14), sent


@of_several_ranks
def case_groups_that_start_later_take_over_what_is_pending():
    local = tfscale.LocalSGD(tfscale.size(), 2, "allreduce", start=1)
    optimizer = DistributedOptimizer(SGD(1.0), compression=Compression.int8, exchange=local)
    variables = new_variables()
    before = values_of(variables)
    optimizer.build(variables)
    train(optimizer, variables, range(4))
    assert all(np.abs(r).max() > 0 for r in pending(optimizer, variables)[:2])
    optimizer.start_groups()
    train(optimizer, variables, range(4, 8))
    assert not any(v.numpy().any() for v in optimizer.bound.executor.residuals.variables)
    rest = pending(optimizer, variables, optimizer.bound.average.residuals)
    require_sums(before, variables, [-r for r in rest], range(8), 3e-5)


# Runs that stop and continue. Their gradients do not depend on the weights: with a learning rate
# of 1, weights and what is pending are the sum of all gradients, at any number of ranks.

N_STEPS, FIRST_STOP, SECOND_STOP, BATCH = 10, 6, 8, 24
RUNS = {
    "int8": (Compression.int8, "allreduce"),
    "int4": (Compression.int4(start_step=4), tfscale.Allreduce(bucket_mb=0)),
    "low_rank": (Compression.low_rank(rank=2, start_step=4), "allreduce"),
    "sharded": (Compression.int8, tfscale.Sharded(dense="weights")),
    "sharded_int4": (Compression.int4(start_step=4), tfscale.Sharded(dense="weights")),
    "local_sgd": (Compression.int8, tfscale.LocalSGD(2, 3)),
    "local_sgd_allreduce": (Compression.int8, tfscale.LocalSGD(2, 3, "allreduce")),
    "local_sgd_overlap": (Compression.int8, tfscale.LocalSGD(2, 3, fragments=2, overlap=2)),
    "local_sgd_int4": (KINDS["int4"], tfscale.LocalSGD(2, 3, "allreduce", overlap=1)),
    "local_sgd_sparse": (SPARSE, tfscale.LocalSGD(2, 4, overlap=3)),
}


# With groups of one rank: others would have residuals of gradients, too, in 8 or 4 bits.
ALONE = ("local_sgd_overlap", "local_sgd_int4")


class Begin(keras.callbacks.Callback):
    """The mean of the groups' kernels plus what is pending, before the first step."""

    total, is_first = None, True

    def on_train_batch_begin(self, batch, logs=None):
        if self.is_first:
            self.is_first = False
            kernel, average = self.model.layers[0].kernel, self.model.optimizer.bound.average
            rest = 0.0
            if any(int(f.left.numpy()) for f in getattr(average, "fragments", ())):
                return  # of the same groups: resumed while averages are in flight
            for residual in average.residuals.all if average and average.residuals else ():
                shards = self.model.optimizer.bound.executor.shards
                piece = shards.owned(0) if shards else None
                own = np.zeros(kernel.shape, "float32")
                at = slice(piece.start, piece.stop) if piece else slice(None)
                own.reshape(-1)[at] += residual.own.numpy().reshape(-1)
                if residual.owner is not None:
                    begin = (piece.start if piece else 0) + residual.cuts[residual.group.rank]
                    part = residual.owner.numpy() * residual.group.size
                    own.reshape(-1)[begin : begin + part.size] += part
                n_whole = tfscale.size() // residual.group.size if piece is None else 1
                total = tfscale.allreduce(own, op=tfscale.Sum)
                rest = total / (residual.group.size * n_whole)
            self.total = tfscale.allreduce(kernel.value, op=tfscale.Average) + rest


def run(name, begin=None):
    """Train from the newest checkpoint to the end; return weights, and the optimizer."""
    keras.utils.set_random_seed(1)
    compression, exchange = RUNS[name]
    if "local" in name and (tfscale.size() % 2 or name in ALONE):
        exchange = replace(exchange, groups=tfscale.size())
    kernel = keras.layers.Dense(70, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((40,)), kernel])
    optimizer = DistributedOptimizer(SGD(1.0), compression=compression, exchange=exchange)
    model.compile(optimizer, lambda y, p: keras.ops.sum(y * p, -1))
    x, y = run_data()
    data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
    folder = Path(os.environ["RUNS_FOLDER"]) / name
    callbacks = [Checkpoint(folder, every_n_steps=1, keep=99)]
    if name.startswith("local_sgd"):
        callbacks += [tfscale.callbacks.Synchronize(), begin or Begin()]
    model.fit(data, verbose=0, callbacks=callbacks)
    return model.layers[0].kernel, optimizer, folder


def run_data():
    rng = np.random.default_rng(2)
    n = N_STEPS * BATCH
    return rng.normal(size=(n, 40)).astype("float32"), rng.normal(size=(n, 70)).astype("float32")


def require_sum(kernel, optimizer):
    if optimizer.bound.groups is not None:
        return  # averages are rounded, too, and the last one drops what it has left
    x, y = map(np.float64, run_data())
    rest = pending(optimizer, [kernel])[0]
    np.testing.assert_allclose(-kernel.numpy() + rest, x.T @ y / BATCH, atol=3e-5)


def begin_runs():
    for name in RUNS:
        kernel, optimizer, folder = run(name)
        require_sum(kernel, optimizer)
        np.save(folder / f"whole{tfscale.rank()}.npy", kernel.numpy())
        forget_after(folder, FIRST_STOP)


def continue_runs():
    """With the same ranks: bit by bit what it would have been without a stop."""
    for name in RUNS:
        kernel, _, folder = run(name)
        require_identical([kernel], [np.load(folder / f"whole{tfscale.rank()}.npy")])
        forget_after(folder, FIRST_STOP)


def continue_runs_with_other_ranks():
    """Local SGD has two groups, of ranks on other hosts, or one of each rank; what is left is kept.

    The mean weights and what is pending are the sum of all gradients so far, also where averages
    were in flight. With one group the weights have all of it.
    """
    for name in RUNS:
        begin, stopped = Begin(), list_checkpoints(Path(os.environ["RUNS_FOLDER"]) / name)[0].step
        kernel, optimizer, folder = run(name, begin)
        require_sum(kernel, optimizer)
        if begin.total is not None and name in (*ALONE, "local_sgd_sparse"):
            x, y = (np.float64(v[: BATCH * stopped]) for v in run_data())
            np.testing.assert_allclose(-begin.total, x.T @ y / BATCH, atol=3e-5)
        forget_after(folder, SECOND_STOP)
