"""Growing batches where memory does not suffice: what is counted as used, and as free."""

import json
from pathlib import Path

import keras
import pytest

from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.test_adaptive_batch_size import adaptive, make_data, make_model
from tfscale.comm import runtime
from tfscale.measure import memory


class Process:
    """Stands for the memory of this process: bytes used now, and at most since a reset."""

    def __init__(self, monkeypatch, free=40, ranks=1):
        self.now = self.peak = 100
        self.free = free
        monkeypatch.setattr(memory, "used_bytes", lambda: self.peak)
        monkeypatch.setattr(memory, "free_bytes", lambda: self.free)
        monkeypatch.setattr(memory, "_reset_peak", self.reset)
        monkeypatch.setattr(runtime, "local_size", lambda: ranks)

    def reset(self):
        self.peak = self.now

    def use(self, peak, now=100):
        self.now, self.peak = now, max(self.peak, peak)


def guard(monkeypatch, free, ranks=1):
    """Return a guard behind an epoch that took 40 bytes, and the process."""
    process, made = Process(monkeypatch, free, ranks), memory.MemoryGuard()
    made.begin_epoch()
    process.use(140)
    made.end_epoch()
    return made, process


def test_memory_is_read_from_the_system():
    assert memory.used_bytes() > 1 << 20
    assert memory.free_bytes() > 0


@pytest.mark.parametrize(
    ("free", "sizes", "fits"),
    [
        (40, (8, 16), True),
        (39, (8, 16), False),
        (79, (8, 24), False),
        (0, (8, 8), True),
        (None, (8, 999), True),
    ],
)
def test_memory_grows_with_the_local_batch(monkeypatch, caplog, free, sizes, fits):
    """40 bytes were taken for 8 samples: 8 more need 40, 16 more 80."""
    assert guard(monkeypatch, free)[0].fits(*sizes) == fits
    told = f"A local batch of {sizes[1]} is expected to need" in caplog.text
    assert told != fits


def test_ranks_of_a_host_share_what_is_free(monkeypatch):
    assert not guard(monkeypatch, 79, ranks=2)[0].fits(8, 16)


def test_what_validation_takes_does_not_count(monkeypatch):
    made, process = guard(monkeypatch, 40)
    process.use(900)
    assert made.fits(8, 16)
    made.begin_epoch()
    process.use(180)  # of 16 samples
    made.end_epoch()
    process.use(900)
    assert not made.fits(16, 32)
    process.free = 80
    assert made.fits(16, 32)


def test_batches_grow_although_validation_takes_much(monkeypatch):
    process, data = Process(monkeypatch), make_data()

    class Use(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            process.use(100 + 2 * data.batch_size)

        def on_test_begin(self, logs=None):
            process.use(5000)

    options = {"epochs": 5, "verbose": 0, "validation_data": make_data(seed=4)}
    callbacks = [adaptive(data), Use()]
    history = make_model().fit(data, callbacks=callbacks, **options).history
    assert history["batch_size"] == [6, 6, 12, 12, 24]


def test_growth_stops_instead_of_a_crash(monkeypatch, tmp_path):
    monkeypatch.setattr(memory.MemoryGuard, "fits", lambda self, now, larger: larger <= 12)
    data, path = make_data(), tmp_path / "adaptive.jsonl"
    model = make_model()
    history = model.fit(
        data, epochs=6, verbose=0, callbacks=[adaptive(data, log_path=path)]
    ).history
    assert history["batch_size"] == [6, 6, 12, 12, 12, 12]
    reasons = [json.loads(line)["reasons"] for line in path.read_text().splitlines()]
    assert reasons[3] == ["the batch stays at 12: 24 is not expected to fit memory"]


STATISTICS = """anon 300
file 600
shmem 50
inactive_anon 120
inactive_file 350
active_file 200
slab 20
"""


@pytest.mark.parametrize(("limit", "left"), [("1000", 650), ("max", None)])
def test_the_page_cache_of_a_container_is_free(monkeypatch, tmp_path, limit, left):
    def path_of(name):
        return tmp_path if name == "/sys/fs/cgroup" else Path(name)

    monkeypatch.setattr(memory, "Path", path_of)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text(STATISTICS)
    assert memory._left_in_group() == left
    monkeypatch.setattr(memory, "_gpu", lambda: None)
    assert memory.free_bytes() == left or (left is None and memory.free_bytes() > 1000)
