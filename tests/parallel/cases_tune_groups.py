"""A probe of local SGD on real ranks: it takes a script's optimizer as it is."""

from __future__ import annotations

import contextlib
import json
from unittest import mock

import keras
import numpy as np

import tfscale
from tests.helpers.ranks import outcome, shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import dense_model
from tests.parallel.local_sgd_reference import BATCH, samples
from tests.parallel.local_sgd_reference import STEPS as STEPS_PER_EPOCH
from tfscale.launcher.tune.scripts import _Done, _enlarge, _GroupsProbe, _regroup, probed_fit

STEPS, INTERVAL = 6, 2


def probed(rule, learning_rate, folder, more=()):
    """Return what a probe of as many groups as there are ranks has written."""
    settings = {"groups": tfscale.size(), "interval": INTERVAL, "rate_rule": "linear"}
    settings |= {"learning_rate": learning_rate, "steps": STEPS, "output": f"{folder}/found.json"}
    keras.utils.set_random_seed(3)
    model = dense_model()
    model.compile(tfscale.DistributedOptimizer(rule), "mse")
    data = tfscale.data.GlobalBatches(*samples(), batch_size=BATCH // 2, shuffle=False)
    _regroup(model, settings)
    _enlarge(data, settings["groups"])
    record = tfscale.callbacks.ModelDistance()
    start = tfscale.callbacks.BroadcastGlobalVariablesCallback(0)
    with contextlib.suppress(_Done):
        callbacks = [*more, start, record, _GroupsProbe(settings, record)]
        model.fit(data, epochs=99, verbose=0, callbacks=callbacks)
    tfscale.barrier()
    return json.loads((folder / "found.json").read_text())


@sizes(2, timeout_s=100)
def case_groups_go_on_apart_behind_an_epoch():
    """A script may have a callback that unites groups; the probe's own must not do so again."""
    found = []
    with shared_folder() as folder:
        settings = {"groups": 2, "interval": 4, "rate_rule": "linear", "learning_rate": None}
        settings |= {"steps": 3 * STEPS_PER_EPOCH, "output": f"{folder}/found.json"}
        for callbacks in ([tfscale.callbacks.BroadcastGlobalVariablesCallback(0)], []):
            keras.utils.set_random_seed(3)
            model = dense_model()
            model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
            data = tfscale.data.GlobalBatches(*samples(), batch_size=BATCH // 2, shuffle=False)
            patched = mock.patch.object(keras.Model, "fit", probed_fit(settings))
            with patched, contextlib.suppress(_Done):
                model.fit(data, epochs=1, verbose=0, callbacks=callbacks)
            tfscale.barrier()
            found.append(json.loads((folder / "found.json").read_text())["distances"])
            tfscale.barrier()
    np.testing.assert_array_equal(*found)


@sizes(2, timeout_s=60)
def case_a_rate_that_changes_is_refused():
    def lower(epoch):
        return 0.5 / (1 + epoch)

    with shared_folder() as folder:
        rule = keras.optimizers.SGD(0.05)
        changes = [keras.callbacks.LearningRateScheduler(lower)]
        text = outcome(lambda: probed(rule, None, folder, changes))
        assert "a rate that the script changes from 0.1 to 0.5 in step 1. " in text, text


@sizes(2, timeout_s=120)
def case_distances_do_not_depend_on_how_the_rate_is_given():
    """Plain, below loss scaling, or in the place of a schedule."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.3, 2, 0.5)
    rules = (
        (keras.optimizers.SGD(0.05, momentum=0.5), None),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.5)), None),
        (keras.optimizers.SGD(schedule, momentum=0.5), 0.05),
    )
    with shared_folder() as folder:
        plain, *others = [probed(rule, rate, folder) for rule, rate in rules]
    assert len(plain["distances"]) == STEPS // INTERVAL and min(plain["distances"]) > 0
    for other in others:
        for key in ("learning_rate", "distances", "loss"):
            np.testing.assert_allclose(other[key], plain[key], rtol=1e-4)
    np.testing.assert_allclose(plain["learning_rate"], 0.05 * tfscale.size(), rtol=1e-6)
