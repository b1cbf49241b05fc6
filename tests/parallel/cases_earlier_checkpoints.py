"""Checkpoints of the code before states had `saved` and `restored` still resume.

Two ranks wrote them at step 3 of 5; `ends.json` has the weights with which they went on to the end.
"""

import json
from pathlib import Path

import keras
import numpy as np

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import shared_folder
from tests.parallel.checkpoint_runs import Steps
from tests.unit.checkpoint_model import info_of
from tfscale.callbacks import BroadcastGlobalVariablesCallback, Checkpoint, MetricAverageCallback
from tfscale.checkpoints.files import Part, folder_name, write_part

DATA = Path(__file__).parent / "earlier_checkpoints"


def optimizer_of(name):
    if name == "sharded":  # parts of slots, and exact weights
        options = {"exchange": tfscale.Sharded(), "compression": tfscale.Compression.bf16}
    else:
        outer = keras.optimizers.SGD(0.7, momentum=0.9)
        options = {"exchange": tfscale.LocalSGD(2, 4, "allreduce", outer=outer)}
    return tfscale.DistributedOptimizer(keras.optimizers.Adam(0.01), **options)


def resumed(name, folder):
    """Return trained weights and the numbers of the steps of a run that resumes."""
    keras.utils.set_random_seed(50 + tfscale.rank())
    layers, steps = keras.layers, Steps()
    hidden = [layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(2)])
    model.compile(optimizer_of(name), "mse", metrics=["mae"])
    draw = np.random.default_rng(1).normal
    arrays = [draw(size=(40, n)).astype(np.float32) for n in (3, 2)]
    data = tfscale.data.GlobalBatches(*arrays, batch_size=8, seed=4)
    callbacks = [BroadcastGlobalVariablesCallback(0), MetricAverageCallback(), steps]
    model.fit(data, verbose=0, callbacks=[Checkpoint(folder), *callbacks])
    return [v.numpy() for v in model.trainable_variables], steps.batches


@sizes(1, 2, timeout_s=200)
def case_checkpoints_of_earlier_code_resume():
    ends = json.loads((DATA / "ends.json").read_text())
    for name in ("sharded", "groups"):
        with shared_folder() as folder:
            for rank in range(2) if tfscale.rank() == 0 else ():
                path = DATA / f"{name}-{rank}.json"
                info = json.loads(path.read_text()) | {"random": info_of(3)["random"]}
                part = Part.stored(DATA, {"info": info, "file": f"{name}-{rank}.safetensors"})
                write_part(folder / folder_name(3, info["run"]), rank, part)
            tfscale.barrier()
            weights, batches = resumed(name, folder)
        assert batches == [3, 4]
        # One rank draws other numbers for dropout than two.
        pairs = list(zip(weights, ends[name], strict=True)) if tfscale.size() == 2 else []
        # BatchNormalization takes away the bias before it: its gradient is what a processor rounds,
        # and Adam makes steps of full length of that.
        del pairs[1:2]
        for own, end in pairs:
            np.testing.assert_allclose(own, end, rtol=1e-5, atol=1e-6, err_msg=name)
