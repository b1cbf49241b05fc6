"""tfscale's callbacks in any order, and the acts of `fit` in that of docs/fit.md."""

import contextlib
import functools
import inspect
import random
import re
import sys
from importlib import import_module
from pathlib import Path
from unittest import mock

import keras
import numpy as np

import tfscale
from tests.helpers.cases import engine_only, sizes
from tests.helpers.ranks import shared_folder, values_of
from tfscale.callbacks import (
    AdaptiveBatchSize,
    BroadcastGlobalVariablesCallback,
    Checkpoint,
    CommunicationReport,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    ModelCheckpoint,
    ModelDistance,
    ParameterAveraging,
    RankZero,
    Synchronize,
    ThetaMonitor,
)
from tfscale.testing import require_identical

PAGE = Path(__file__).parents[2] / "docs" / "fit.md"


def train(optimizer, callbacks_for, epochs=3):
    """Train a small model on few samples; return history and weights."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    n = 8 * tfscale.size()
    x = np.random.default_rng(2).normal(size=(4 * n, 3)).astype("float32")
    data = tfscale.data.GlobalBatches(x, x[:, :1], batch_size=n, seed=3)
    valid = tfscale.data.GlobalBatches(x, x[:, :1], batch_size=n, shuffle=False)
    options = {"validation_data": valid, "epochs": epochs, "verbose": 0}
    history = model.fit(data, callbacks=callbacks_for(data), **options).history
    return history, [*values_of(model.variables), *values_of(model.optimizer.variables)]


def distributed(**options):
    return tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **options)


def growing(folder, data):
    """Return all of tfscale's callbacks that act in one `fit` of a DistributedOptimizer."""
    start = data.batch_size
    growth = {"interval": 1, "warmup_epochs": 1, "log_path": None}
    return [
        Checkpoint(folder / "checkpoints", 3, every_n_epochs=1, asynchronous=False),
        Synchronize(),
        CommunicationReport(folder),
        ModelDistance(),
        ThetaMonitor(folder),
        AdaptiveBatchSize(data, 2 * start, start_batch_size=start, **growth),
        LearningRateWarmupCallback(0.1, 1),
    ]


def averaging(folder, data):
    weights = tfscale.DistanceWeights(1.0)
    options = {"consistency_check": False, "non_trainable": "local"}
    return [
        Checkpoint(folder / "checkpoints", asynchronous=False),
        BroadcastGlobalVariablesCallback(0, **options),
        MetricAverageCallback(),
        ParameterAveraging(weights=weights),
    ]


def of_keras(folder):
    return [
        keras.callbacks.EarlyStopping("val_loss", patience=9),
        keras.callbacks.TerminateOnNaN(),
        RankZero(keras.callbacks.CSVLogger(folder / "log.csv")),
    ]


def shuffled(own, others, draw):
    """Return callbacks in a random order; the others keep theirs, and one of them is the first."""
    own, others = draw.sample(own, len(own)), list(others)
    mixed = [others.pop(0)]
    while own or others:
        source = draw.choice([part for part in (own, others) if part])
        mixed.append(source.pop(0))
    return mixed


def in_order(make, draw, folder):
    def callbacks_for(data):
        own, others = make(folder, data), of_keras(folder)
        return [*own, *others] if draw is None else shuffled(own, others, draw)

    return callbacks_for


@sizes(2, 3, timeout_s=240)
def case_every_order_gives_the_same_logs_and_weights():
    """Also if the order differs between ranks."""
    for make, optimizer in ((growing, distributed), (averaging, lambda: keras.optimizers.SGD(0.1))):
        expected = None
        for draw in (None, random.Random(1), random.Random(2 + tfscale.rank())):
            with shared_folder() as folder:
                history, weights = train(optimizer(), in_order(make, draw, folder))
                log = (folder / "log.csv").read_text()
            if expected is None:
                expected = history, weights, log
            assert repr(history) == repr(expected[0]), (history, expected[0])
            require_identical(weights, expected[1])
            assert log == expected[2]


class Acts:
    """Records what `fit` does, hook by hook."""

    def __init__(self):
        self.recorded = []  # pairs of hook and acts
        self._hooks = []  # that run

    def within(self, hook, method):
        @functools.wraps(method)
        def noting(*args, **kwargs):
            self._hooks.append((hook, []))
            try:
                return method(*args, **kwargs)
            finally:
                self.recorded.append(self._hooks.pop())

        return noting

    def noting(self, act, function):
        @functools.wraps(function)
        def noting(*args, **kwargs):
            if self._hooks:
                self._hooks[-1][1].append(act)
            return function(*args, **kwargs)

        return noting


def acts_of_page():
    """Return the acts of each hook, in order, as they are on the page."""
    (text,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.S)
    acts, hook = {}, ""
    for line in text.splitlines():
        if match := re.fullmatch(r" *(?:callbacks\.)?(\w+):", line):
            hook = match[1]
        elif match := re.fullmatch(r" +.+? {2,}([\w.]+:[\w.]+)", line):
            acts.setdefault(hook, []).append(match[1])
        else:
            assert re.fullmatch(r"fit\(.*|for each .*:|\(.*\)", line.strip()), line
    return acts


@contextlib.contextmanager
def recorded_acts(names):
    acts = Acts()
    with contextlib.ExitStack() as stack:

        def replace(owner, name, new):
            stack.enter_context(mock.patch.object(owner, name, new))

        for act in names:
            module, _, path = act.partition(":")
            owner, _, name = path.rpartition(".")
            home = import_module(f"tfscale.{module}")
            if owner:
                kind = getattr(home, owner)
                method = inspect.getattr_static(kind, name)
                is_of_class = isinstance(method, classmethod)
                new = acts.noting(act, method.__func__ if is_of_class else method)
                replace(kind, name, classmethod(new) if is_of_class else new)
                continue
            function = getattr(home, name)
            for module in [m for n, m in sys.modules.items() if n.startswith("tfscale")]:
                if vars(module).get(name) is function:
                    replace(module, name, acts.noting(act, function))
        hooks = [n for n in vars(keras.callbacks.CallbackList) if n.startswith(("on_", "set_m"))]
        for hook in hooks:
            method = getattr(keras.callbacks.CallbackList, hook)
            replace(keras.callbacks.CallbackList, hook, acts.within(hook, method))
        step = import_module("tfscale.fit.uneven_batches").GuardedStep
        replace(step, "__call__", acts.within("train_function", step.__call__))
        yield acts


@engine_only("its collectives are reported")
@sizes(2, timeout_s=240)
def case_the_page_has_the_acts_of_fit_in_order():
    expected = acts_of_page()
    interval = tfscale.AdaptiveInterval(2)
    groups = tfscale.LocalSGD(groups=2, interval=interval, within="allreduce", start=1)
    runs = [
        (growing, lambda: distributed(exchange=tfscale.Sharded()), (2, 4)),
        (lambda folder, data: [Synchronize()], lambda: distributed(exchange=groups), (3,)),
        (averaging, lambda: keras.optimizers.SGD(0.1), (2,)),
    ]
    names = sorted({act for acts in expected.values() for act in acts})
    with recorded_acts(names) as acts:
        for make, optimizer, lengths in runs:
            with shared_folder() as folder:
                for epochs in lengths:  # the second resumes

                    def callbacks_for(data, make=make, folder=folder):
                        save = ModelCheckpoint(folder / "model.keras")
                        return [save, *make(folder, data)[::-1]]

                    train(optimizer(), callbacks_for, epochs)
    wrong, found = set(), {}
    for hook, recorded in acts.recorded:
        first = list(dict.fromkeys(recorded))
        found.setdefault(hook, set()).update(first)
        on_page = [act for act in expected.get(hook, []) if act in first]
        if first != on_page and hook != "set_model":  # which arranges
            wrong.add(f"{hook}: fit does {first}, the page says {on_page}")
    for hook, known in expected.items():
        missing = sorted(set(known) - found.get(hook, set()))
        wrong |= {f"{hook}: fit never does {missing}"} if missing else set()
    assert not wrong, "\n".join(sorted(wrong))
