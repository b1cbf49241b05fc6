"""The state of a sharded optimizer: its size on each rank, and steps that all ranks skip."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf

import tfscale
from recipes.models.vgg import vgg
from tests.helpers.ranks import dtype_policy, require_equal_ranks, shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import dense_model
from tests.parallel.cases_sharded_options import own_rows
from tests.parallel.sharded_model import N_STEPS, Adam, compiled, data, fit, sharded
from tfscale.callbacks import BroadcastGlobalVariablesCallback, CommunicationReport

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
def case_memory_of_vgg(input_shape=(64, 64, 3)):
    """Adam on VGG-A at 64x64: at most 0.27 of the state of one process on each of 4 ranks."""
    model = vgg(input_shape=(64, 64, 3))
    model.compile(sharded(Adam(0.01)), "mse")
    tfscale.prepare(model)
    report = model.optimizer.memory_report()
    assert report["complete_state"] >= 8 * model.count_params()
    shares = tfscale.allgather_object(report["state"] / report["complete_state"])
    assert max(shares) <= 0.27, shares


def scaled_model(policy):
    """A model under a policy whose float16 gradients overflow for large errors."""
    with dtype_policy(policy):
        keras.utils.set_random_seed(3)
        model = dense_model()
    inner = keras.optimizers.SGD(0.01, momentum=0.9)
    scaler = LSO(inner, initial_scale=1024.0, dynamic_growth_steps=3)
    model.compile(sharded(scaler), "mse", auto_scale_loss=False)
    return tfscale.prepare(model)


@sizes(2, 3, 4, timeout_s=100)
def case_all_ranks_skip_a_step_that_is_infinite_on_one():
    for policy in ("mixed_float16", "mixed_bfloat16"):
        model = scaled_model(policy)
        optimizer = model.optimizer
        x, y = data()
        bad = np.array(own_rows(y, 0))
        if tfscale.rank() == tfscale.size() - 1:
            bad[0, 0] = np.inf
        before = [*(v.numpy() for v in model.trainable_variables), *optimizer.full_state()[2:]]
        n_own = len(optimizer._variables)
        for wanted, targets in ((512.0, bad), (512.0, own_rows(y, 0)), (256.0, bad)):
            count = int(optimizer.iterations.numpy())
            model.train_on_batch(own_rows(x, 0), targets)
            scales = tfscale.allgather_object(float(optimizer.dynamic_scale.numpy()))
            assert scales == [wanted] * tfscale.size(), (policy, scales)
            is_skipped = targets is bad
            assert int(optimizer.iterations.numpy()) == count + (not is_skipped)
            after = [*(v.numpy() for v in model.trainable_variables), *optimizer.full_state()[2:]]
            has_changed = any(
                not np.array_equal(a, b)
                for i, (a, b) in enumerate(zip(before, after, strict=True))
                # The scaler's own counters change in each step.
                if not len(model.trainable_variables) <= i < len(model.trainable_variables) + n_own
            )
            assert has_changed != is_skipped
            before = after
            require_equal_ranks(model.trainable_variables)
            require_equal_ranks([tf.Variable(a) for a in optimizer.full_state()])
