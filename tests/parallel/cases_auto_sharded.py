"""Plans that shard parameters in training, wholly or in part, and back: equal to one process."""

import functools

import keras
import numpy as np

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.equality import TOLERANCE
from tests.helpers.ranks import dtype_policy, float64, shared_folder
from tfscale.callbacks import Callback
from tfscale.exchange.auto import Mixed, strategy_of
from tfscale.measure.auto import table_of
from tfscale.plan.parts import LayerPart, LayerPlan, bucketed
from tfscale.testing import inspect, require_equal_ranks

BATCH, STEPS = 24, 12
RULES = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "scheduled": lambda: keras.optimizers.SGD(falling_rate(), momentum=0.9),
    "clipped": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.05),
}
# Exchange of each layer of `build`, first layer first.
MIXED = ("allreduce", "partial", "replicated", "sharded", "sharded", "allreduce")


def build() -> keras.Model:
    keras.utils.set_random_seed(5)
    layers = keras.layers
    inputs = keras.Input((4, 4, 2))
    x = layers.Conv2D(3, 3, activation="tanh", name="first")(inputs)
    x = layers.Flatten()(x)
    for n, name in ((17, "partly"), (11, "wholly"), (9, "one"), (7, "other")):
        x = layers.Dense(n, activation="tanh", name=name)(x)
    return keras.Model(inputs, layers.Dense(3, name="top")(x), name="mixed_model")


def falling_rate() -> tfscale.ScalableSchedule:
    """Return a schedule that has a state: it was made twice as high."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 4, 0.8)
    scaled = tfscale.ScalableSchedule(schedule)
    scaled.rescale(2.0, 1.0, 0)
    return scaled


def samples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return random.normal(size=(STEPS * BATCH, 4, 4, 2)), random.normal(size=(STEPS * BATCH, 3))


def plan_of(model: keras.Model, kinds) -> LayerPlan:
    """Return a plan in which layer i has the exchange kinds[i], neighbours of one kind together."""
    table = table_of(model)
    parts: list[LayerPart] = []
    for place, kind in enumerate(kinds):
        own = tuple(i for i, p in enumerate(table.parameters) if p.layer == place)
        if parts and parts[-1].kind == kind and kind in ("allreduce", "sharded"):
            parts[-1] = LayerPart(kind, (*parts[-1].parameters, *own))
        else:
            parts.append(LayerPart(kind, own))
    return LayerPlan(tuple(reversed(parts)))


def mixed(model: keras.Model, kinds=MIXED) -> Mixed:
    """Return the strategy of such a plan."""
    return strategy_of(table_of(model), plan_of(model, kinds), "mixed")


class Script:
    """Stands in for the planner: other strategies after some steps."""

    may_cut = True

    def __init__(self, strategies: dict[int, object]) -> None:
        self._strategies, self._n_steps = strategies, 0

    def step(self, data=None, callbacks=()):
        self._n_steps += 1
        return self._strategies.get(self._n_steps)


def train(model: keras.Model, make_rule, script, steps=slice(0, STEPS), **options) -> None:
    """Train on the global batches of some steps; `script` maps a step to the next strategy."""
    x, y = (v[steps.start * BATCH : steps.stop * BATCH] for v in samples())
    if not model.compiled:
        sgd = tfscale.DistributedOptimizer(make_rule(), exchange=tfscale.Auto())
        model.compile(sgd, loss="mse")
        tfscale.prepare(model, batch_size=BATCH)
    model.optimizer._self_watch = Script(script)
    data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
    model.fit(data, verbose=0, callbacks=[*options.pop("callbacks", ()), Callback()], **options)


@functools.cache
def alone(make_rule) -> keras.Model:
    model = build()
    model.compile(make_rule(), loss="mse")
    model.fit(*samples(), batch_size=BATCH, shuffle=False, verbose=0)
    return model


def require_same(model: keras.Model, single: keras.Model) -> None:
    require_equal_ranks(model.trainable_variables)
    ours = [*model.get_weights(), *model.optimizer.full_state()]
    theirs = [*single.get_weights(), *(v.numpy() for v in single.optimizer.variables)]
    for i, (own, expected) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_allclose(own, expected, rtol=0, atol=TOLERANCE, err_msg=str(i))


@sizes(2, 3, 4, timeout_s=240)
def case_there_and_back_amid_a_fit():
    """Allreduce, a mixture, all sharded, allreduce: each of them trains for some steps."""
    extra = {2: ["scheduled"], 3: ["clipped"]}
    for name in ("adam", "momentum", *extra.get(tfscale.size(), [])):
        make_rule = RULES[name]
        with float64():
            model, single = build(), alone(make_rule)
            table = table_of(model)
            plain = strategy_of(table, bucketed(table, 2000), "plain")
            whole = mixed(model, ("sharded",) * len(MIXED))
            before = model.get_weights()
            train(model, make_rule, {3: mixed(model), 6: whole, 9: plain})
        assert not np.array_equal(before[0], model.get_weights()[0]), name
        assert not model.optimizer.shares_state
        require_same(model, single)


@sizes(2, 4, timeout_s=240)
def case_a_mixture_is_what_it_says():
    """Who holds which state, how dense layers are called, and evaluation in between."""
    with float64():
        model, single = build(), alone(RULES["adam"])
        train(model, RULES["adam"], {2: mixed(model)}, slice(0, 7))
        x, y = samples()
        model.evaluate(x[:BATCH], y[:BATCH], verbose=0)
        train(model, RULES["adam"], {}, slice(7, STEPS))
    optimizer = model.optimizer
    cut = {v.path.split("/")[0] for v in optimizer.bound.executor.shards.cut}
    assert cut == {"partly", "one", "other"}, cut
    calls = {name: inspect.dense_route(model.get_layer(name)) for name in cut}
    assert calls["partly"] == "partial" and calls["one"] == "weights", calls
    assert inspect.dense_route(model.get_layer("wholly")) == "replicated"
    report = optimizer.memory_report()
    assert report["state"] < report["complete_state"], report
    require_same(model, single)


@sizes(3, timeout_s=240)
def case_saved_by_a_callback_after_the_change_and_resumed():
    """The checkpoint of rank 0 holds complete state, and trains on in a plan or without one."""
    with float64(), shared_folder() as folder:
        single = alone(RULES["adam"])
        path = str(folder / "model.keras")
        save = [keras.callbacks.ModelCheckpoint(path)] if tfscale.rank() == 0 else []
        model = build()
        train(model, RULES["adam"], {2: mixed(model)}, slice(0, 6), callbacks=save)
        tfscale.barrier()
        plain = strategy_of(table_of(model), plan_of(model, ("allreduce",) * len(MIXED)), "plain")
        for script in ({}, {2: mixed(model), 4: plain}):
            again = tfscale.load_model(path, exchange=tfscale.Auto())
            tfscale.prepare(again)
            train(again, None, script, slice(6, STEPS))
            require_same(again, single)


@sizes(2, timeout_s=120)
def case_mixed_precision():
    """Loss scaling inside: the finite flag is agreed on, and the scale moves with the state."""
    with dtype_policy("mixed_float16"):
        model = build()
        inner = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))  # noqa: E731
        train(model, inner, {3: mixed(model), 8: tfscale.Allreduce()})
    assert float(model.optimizer.iterations.numpy()) == STEPS
    assert all(np.isfinite(v).all() for v in model.get_weights())
    require_equal_ranks(model.trainable_variables)
