"""A rank that dies between sending an average and merging it: the run resumes bit by bit."""

import re

import pytest

from tests.helpers.killed_job import DEADLINE_S, START_S, Job

SCRIPT = """
import hashlib, os, signal, sys
import keras, numpy as np
import tfscale
from tests.helpers.launching import meet
meet(__file__)
tfscale.init()
folder, kind, is_killed = sys.argv[1:]
keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(48, "tanh") for _ in range(3)]
model = keras.Sequential([keras.Input((32,)), *layers])
few = {"int8": tfscale.Compression.int8, "sparse": tfscale.Compression.sparse(share=1 / 16)}
optimizer = tfscale.DistributedOptimizer(
    keras.optimizers.Adam(0.01),
    exchange=tfscale.LocalSGD(2, 4, "allreduce", fragments=2, overlap=3),
    compression=few[kind],
)
model.compile(optimizer, "mse")
random = np.random.default_rng(1)
x, y = np.float32(random.normal(size=(240, 32))), np.float32(random.normal(size=(240, 48)))
data = tfscale.data.GlobalBatches(x, y, batch_size=12, seed=4)

class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        # Sent after steps 24 and 26, merged after 27 and 29; the checkpoint is of step 25.
        is_first = os.environ["TFSCALE_RESTART"] == "0"
        if step == 26 and tfscale.rank() == 1 and is_killed == "yes" and is_first:
            os.kill(os.getpid(), signal.SIGKILL)

callbacks = [tfscale.callbacks.Checkpoint(folder, every_n_steps=5, keep=9)]
callbacks += [tfscale.callbacks.Synchronize(), Die()]
model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
average = optimizer.bound.average
values = [v.numpy() for v in [*model.variables, *average.variables]]
digest = hashlib.sha256(b"".join(v.tobytes() for v in values)).hexdigest()
print(f"DIGEST {tfscale.rank()} {digest} restarts={os.environ['TFSCALE_RESTART']}", flush=True)
"""


@pytest.mark.timeout(4 * START_S)
@pytest.mark.parametrize("kind", ["int8", "sparse"])
def test_a_kill_between_send_and_merge(tmp_path, kind):
    found = {}
    for is_killed in ("no", "yes"):
        folder = tmp_path / is_killed
        folder.mkdir()
        words = [str(folder / "saved"), kind, is_killed]
        environ = {"TFSCALE_COMPARE_AVERAGES": "1"}
        with Job(folder, SCRIPT, *words, options=["--restarts", "1"], environ=environ) as job:
            assert job.process.wait(START_S + DEADLINE_S) == 0, job.output()[-6000:]
            text = job.output()
        found[is_killed] = dict(re.findall(r"DIGEST (\d) (\w+)", text))
        assert f"restarts={int(is_killed == 'yes')}" in text
    assert found["yes"] == found["no"] and len(found["no"]) == 2
