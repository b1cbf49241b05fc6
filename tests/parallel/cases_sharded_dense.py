"""Dense layers of sharded models that exchange activations: equal to one process."""

import keras
import numpy as np

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.equality import conv_model, mlp
from tests.helpers.ranks import dtype_policy, float64
from tests.parallel.cases_sharded import case_clipping
from tests.parallel.sharded_dense_model import DENSE, STRATEGIES, compiled
from tests.parallel.sharded_model import SHARDED, check
from tfscale.testing import require_close, require_identical


@sizes(2, 3, 4, timeout_s=300)
def case_dense_layers_equal_one_process():
    """At 4 ranks the second layer has 3 rows: it exchanges weights."""
    for route in DENSE:
        for name in ("momentum", "adam"):
            check(mlp(), SHARDED[name], tfscale.Sharded(dense=route))
        strategy = tfscale.Sharded(dense=route, overlap=False, overlap_forward=False)
        check(mlp(use_bias=False), SHARDED["adam"], strategy)
    check(conv_model, SHARDED["momentum"], tfscale.Sharded(dense="partial", bucket_mb=0))
    for options in ({"run_eagerly": True}, {"steps_per_execution": 5}):
        check(mlp(), SHARDED["adam"], tfscale.Sharded(dense="partial"), **options)


@sizes(2, 3, 4, timeout_s=300)
def case_clipping_decay_and_averages():
    def decayed() -> keras.optimizers.Optimizer:
        rule = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        rule.exclude_from_weight_decay(var_names=["bias"])
        return rule

    case_clipping(mlp(), tfscale.Sharded(dense="partial"))
    for route in DENSE:
        check(mlp(), decayed, tfscale.Sharded(dense=route))


def constrained() -> keras.Model:
    """Return a model with a layer that is called twice, and weights that are constrained."""
    limit, inputs = keras.constraints.MaxNorm(0.5), keras.Input((6,))
    layer = keras.layers.Dense(6, activation="tanh", bias_constraint=limit)
    hidden = keras.layers.Dense(7, kernel_constraint=limit)(layer(layer(inputs)))
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


@sizes(2, 3, timeout_s=300)
def case_constraints_shared_layers_and_whole_rules():
    """A layer that is called twice; a kernel and rules that must not be cut."""
    for route in DENSE:
        check(constrained, SHARDED["adam"], tfscale.Sharded(dense=route))
        check(mlp(), SHARDED["lamb"], tfscale.Sharded(dense=route))


@sizes(2, 3, timeout_s=240)
def case_uneven_local_batches():
    """Ranks with different numbers of samples: the same as with whole gradients."""
    random = np.random.default_rng(tfscale.rank())
    n = 1 + (tfscale.rank() * 3) % 4  # 1, 4, 3
    x, y = random.normal(size=(n, 6)), random.normal(size=(n, 3))
    results = []
    for strategy in ("allreduce", *STRATEGIES):
        with float64():
            model = compiled(mlp(), strategy)
            tfscale.prepare(model)
            for _ in range(3):
                model.train_on_batch(x, y)
            results.append(model.get_weights())
    for found in results[1:]:
        require_close(found, results[0], atol=1e-12)


def changes(policy: str, strategy) -> list[np.ndarray]:
    """Return what some steps in half precision add to the weights."""
    with dtype_policy(policy):
        rule = keras.optimizers.SGD(0.1)
        if policy == "mixed_float16":
            rule = keras.optimizers.LossScaleOptimizer(rule, initial_scale=16.0)
        model = compiled(mlp(), strategy, rule)
    tfscale.prepare(model)
    random = np.random.default_rng(tfscale.rank())
    x, y = random.normal(size=(8, 6)), random.normal(size=(8, 3))
    begin = model.get_weights()
    for _ in range(4):
        model.train_on_batch(x, y)
    return [w - b for w, b in zip(model.get_weights(), begin, strict=True)]


@sizes(2, 3, timeout_s=240)
def case_mixed_precision():
    """Half precision on the wire and in the products: close to weights, and equal on all ranks."""
    for policy in ("mixed_float16", "mixed_bfloat16"):
        expected = changes(policy, tfscale.Sharded(dense="weights"))
        for strategy in STRATEGIES:
            found = changes(policy, strategy)
            for mine, other in zip(found, expected, strict=True):
                atol = 0.05 * np.abs(other).max() + 1e-3
                np.testing.assert_allclose(mine, other, rtol=0, atol=atol)
            for theirs in tfscale.allgather_object(found):
                require_identical(found, theirs)


def adam_model(strategy=None) -> keras.Model:
    rule = keras.optimizers.Adam(0.01)
    if strategy is None:
        model = mlp()()
        model.compile(optimizer=rule, loss="mse")
    else:
        model = tfscale.prepare(compiled(mlp(), strategy, rule))
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model


@sizes(2, 3, 4, timeout_s=300)
def case_a_checkpoint_between_two_steps():
    """Complete state loads in one process and with another strategy; evaluations in between."""
    random = np.random.default_rng(5)
    x, y = random.normal(size=(8, 12, 6)), random.normal(size=(8, 12, 3))
    n = 12 // tfscale.size()
    own = slice(tfscale.rank() * n, (tfscale.rank() + 1) * n)
    for ours, others in zip(STRATEGIES, reversed(STRATEGIES), strict=True):
        with float64():
            model = adam_model(ours)
            for step in range(4):
                model.train_on_batch(x[step, own], y[step, own])
                model.evaluate(x[0], y[0], verbose=0)
            weights, state = model.get_weights(), model.optimizer.full_state()
            other, plain = adam_model(others), adam_model()
            for loaded in (other, plain):
                loaded.set_weights(weights)
                loaded.optimizer.load_own_variables({str(i): v for i, v in enumerate(state)})
            for step in range(4, 8):
                model.train_on_batch(x[step, own], y[step, own])
                other.train_on_batch(x[step, own], y[step, own])
                plain.train_on_batch(x[step], y[step])
            for one in (model, other):
                require_close(one.get_weights(), plain.get_weights())
                require_close([one.predict(x[0], verbose=0)], [plain.predict(x[0], verbose=0)])
