"""`tfscale tune` on real ranks: a probe of local SGD, and measured links."""

import argparse
import contextlib
import json
import math
from unittest import mock

import keras
import numpy as np

import tfscale
from tests.helpers.cases import engine_only, sizes
from tests.helpers.equality import dense_model
from tests.helpers.ranks import outcome, require_error, shared_folder
from tests.parallel.local_sgd_reference import BATCH, STEPS, samples
from tfscale.measure.model_layers import find_model, read_layers
from tfscale.plan.costs import Scenario
from tfscale.plan.machines import find_machine
from tfscale.plan.parts import bucketed
from tfscale.plan.simulate import simulate
from tfscale.tune import links
from tfscale.tune.links import measure_model
from tfscale.tune.scripts import (
    Done,
    GroupsProbe,
    enlarge,
    probed_fit,
    regroup,
    train_compressed,
)


def probe(folder, run, **settings):
    """Return the record of a probe of local SGD; `run` trains a model on data. Collective."""
    settings = {"rate_rule": "linear", "learning_rate": None, **settings}
    settings |= {"groups": 2, "output": f"{folder}/found.json"}
    keras.utils.set_random_seed(3)
    model = dense_model()
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    data = tfscale.data.GlobalBatches(*samples(), batch_size=BATCH // 2, shuffle=False)
    with contextlib.suppress(Done):
        run(model, data, settings)
    tfscale.barrier()
    found = json.loads((folder / "found.json").read_text())
    tfscale.barrier()
    return found


@sizes(2, timeout_s=100)
def case_groups_go_on_apart_behind_an_epoch():
    """A script may have a callback that unites groups; the probe's own must not do so again."""
    with shared_folder() as folder:
        found = []
        for callbacks in ([tfscale.callbacks.BroadcastGlobalVariablesCallback(0)], []):

            def run(model, data, settings, given=callbacks):
                with mock.patch.object(keras.Model, "fit", probed_fit(settings)):
                    model.fit(data, epochs=1, verbose=0, callbacks=given)

            found.append(probe(folder, run, interval=4, steps=3 * STEPS)["distances"])
    np.testing.assert_array_equal(*found)


@engine_only("its events are looked at")
@sizes(4, timeout_s=60)
def case_links_are_measured_host_by_host():
    rank = tfscale.rank()
    for number in (rank // 2, rank % 3):  # by turns; three ranks on one host and one on another
        with mock.patch.object(links.runtime, "local_rank", lambda own=number: own):
            require_error(lambda: links.main(None), "started host by host")


@sizes(2, timeout_s=60)
def case_a_rate_that_changes_is_refused():
    def run(model, data, settings):
        regroup(model, settings)
        enlarge(data, settings["groups"])
        record = tfscale.callbacks.ModelDistance()
        lower = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (1 + epoch))
        start = tfscale.callbacks.BroadcastGlobalVariablesCallback(0)
        callbacks = [lower, start, record, GroupsProbe(settings, record)]
        model.fit(data, epochs=99, verbose=0, callbacks=callbacks)

    text = "a rate that the script changes from 0.1 to 0.5 in step 1. "
    with shared_folder() as folder:
        require_error(lambda: probe(folder, run, interval=2, steps=6), text)


SCRIPT = """
import sys, keras, numpy as np, tfscale
keras.utils.set_random_seed(7)
x = np.random.default_rng(3).normal(size=(96, 40)).astype("float32")
data = tfscale.data.GlobalBatches(x, x[:, :30], batch_size=12)
model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50), keras.layers.Dense(30)])
optimizer = keras.optimizers.SGD(0.1)
if sys.argv[1] != "none":
    optimizer = tfscale.DistributedOptimizer(optimizer, exchange=sys.argv[1])
model.compile(optimizer, "mse", metrics=["mae"])
start = tfscale.callbacks.BroadcastGlobalVariablesCallback(0)
stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)  # after two epochs
model.fit(data, validation_data=(x, x[:, :30]), epochs=3, verbose=0, callbacks=[start, stop])
raise AssertionError("the probe ends the script")
"""


@engine_only("its events are looked at")
@sizes(2, timeout_s=120)
def case_a_script_trains_with_each_compression_and_seed():
    with shared_folder() as folder:
        script, output = folder / "script.py", folder / "probe.json"
        if tfscale.rank() == 0:
            script.write_text(SCRIPT)

        def found(name, seed=1, exchange="allreduce", epochs=None):
            tfscale.barrier()
            settings = {"compression": name, "seed": seed, "start_step": 4, "epochs": epochs}
            settings["output"] = str(output)
            train_compressed([str(script), exchange], settings)
            tfscale.barrier()
            return json.loads(output.read_text())

        none, again, other = found("none"), found("none"), found("none", seed=2)
        few, short = found("int4"), found("none", epochs=1)
        assert none["metric"] == "val_mae" and (none["compression"], none["seed"]) == ("none", 1)
        assert none["value"] == again["value"] != other["value"] and none["value"] < short["value"]
        sent = [found["MB per step"] for found in (none, few)]
        assert math.isclose(sent[0], 4e-6 * (41 * 50 + 51 * 30)) and sent[1] < sent[0] / 5, sent
        assert 0 < abs(few["value"] - none["value"]) < 0.1 and few["ms per step"] > 0
        refused = found("low_rank", exchange="sharded")
        assert refused.keys() == {"compression", "seed", "refused"}
        assert "Received: Compression.low_rank for exchange='sharded'" in refused["refused"]
        text = outcome(lambda: found("int8", exchange="none"))
        assert "must use tfscale.DistributedOptimizer. Received: SGD." in text, text


def few_rounds():
    """Measure little: these tests are not about precision."""
    return mock.patch.multiple(links, ROUNDS=3, SIZES=(4096, 65536, 2**20))


def measured():
    with few_rounds():
        between = links.measure_links(tfscale.global_process_set)
        return links.machine_from(between, [], links.measure_compute())


@engine_only("its events are looked at")
@sizes(2, 3, timeout_s=120)
def case_links_are_measured_alike_on_all_ranks():
    machine = measured()
    assert all(other == machine for other in tfscale.allgather_object(machine))
    assert machine.ranks_per_host == tfscale.size()
    assert math.isclose(machine.link(2).bytes_per_s, machine.host_bytes_per_s)  # rounded: x * 3 / 3
    # Between a slow Ethernet and the fastest memory there is.
    assert 1e6 < machine.host_bytes_per_s < 1e12
    assert 0 <= machine.host_latency_s < 1
    names = {"latency_s", "bytes_per_s", "reduce_bytes_per_s", "flops_per_s", "memory_bytes_per_s"}
    assert set(machine.spread) == names
    with shared_folder() as folder:
        if tfscale.rank() == 0:
            machine.save(folder / "machine.json")
        tfscale.barrier()
        assert find_machine(str(folder / "machine.json")) == machine


@engine_only("its events are looked at")
@sizes(4, timeout_s=120)
def case_the_inside_of_a_host_is_measured_with_its_ranks():
    """Four ranks of one host play two hosts of two."""
    with few_rounds(), mock.patch.object(links.runtime, "local_size", lambda: 2):
        inside = links.measure_inside()
    assert len(inside) == 3
    assert all(other == inside for other in tfscale.allgather_object(inside))


@engine_only("its events are looked at")
@sizes(2, timeout_s=180)
def case_the_layers_of_a_model_are_timed():
    options = argparse.Namespace(
        model="tests.unit.test_forecast:small_model", model_file=None, input_shape="", batch=8
    )
    machine = measure_model(measured(), options, find_model(options.model, None))
    times = machine.layer_times["small"]
    assert times.batch == 8
    assert set(times.forward_s) == set(times.backward_s)
    assert 0 < machine.compute_share <= 1 and 0 < machine.message_share <= 1
    assert sum(times.forward_s.values()) > 0 and min(times.backward_s.values()) >= 0
    assert "step of small" in machine.spread
    table = read_layers(find_model(options.model, None))
    scenario = Scenario(table, machine, 2, 16)
    predicted = simulate(scenario, bucketed(table, None))
    least = sum(times.forward_s.values()) + sum(times.backward_s.values())
    assert predicted.step_s >= least * (1 - 1e-6)
