"""Growing batches where memory does not suffice: what is counted as used, and as free."""

from pathlib import Path

import keras
import pytest

from tests.unit.adaptive_model import adaptive, make_data, make_model
from tests.unit.callback_models import single_job  # noqa: F401
from tfscale.callbacks import epoch_measures as measures
from tfscale.testing import pretend_rank


class Process:
    """Stands for the memory of this process: bytes used now, and at most so far."""

    def __init__(self, monkeypatch, free=40.0):
        self.now = self.peak = 100
        self.free = free
        monkeypatch.setattr(measures, "_used_bytes", lambda: (self.now, self.peak))
        monkeypatch.setattr(measures, "_free_bytes", lambda: self.free)

    def use(self, peak):
        self.peak = max(self.peak, peak)

    def run_epoch(self, guard, samples, peak=0):
        guard.begin_epoch()
        self.use(peak)
        guard.end_epoch(samples)


def guard(monkeypatch, free):
    """Return a guard after an epoch that took 40 bytes for 8 samples, and the process."""
    process, made = Process(monkeypatch, free), measures.MemoryGuard()
    process.run_epoch(made, 8, 140)
    return made, process


def test_memory_is_read_from_the_system():
    now, peak = measures._used_bytes()
    assert 1 << 20 < now <= peak
    assert 0 < measures._free_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("free", "now", "larger", "fits"),
    [
        (40, 8, 16, True),
        (39, 8, 16, False),
        (79, 8, 24, False),
        (-1, 8, 8, True),
        (-1, 8, 9, False),
    ],
)
def test_memory_grows_with_the_local_batch(monkeypatch, caplog, free, now, larger, fits):
    """40 bytes were taken for 8 samples: 8 more need 40, 16 more 80."""
    assert guard(monkeypatch, free)[0].fits(now, larger) == fits
    told = f"A local batch of {larger} is expected to need" in caplog.text
    assert told != fits


def test_the_latest_epoch_counts_and_validation_does_not(monkeypatch):
    made, process = guard(monkeypatch, 40)
    process.use(900)
    assert made.fits(8, 16)
    process.run_epoch(made, 16, 180)
    assert not made.fits(16, 32)
    process.free = 80
    assert made.fits(16, 32)
    made, process = guard(monkeypatch, 80)
    assert made.fits(16, 32)
    process.run_epoch(made, 16, 190)  # 90 instead of 80 for 16 samples
    assert not made.fits(16, 32)


def test_an_earlier_peak_counts_where_nothing_else_is_known(monkeypatch):
    """Loading data took 400 bytes; steps that stay below may have taken as much."""
    process, made = Process(monkeypatch, free=399), measures.MemoryGuard()
    process.use(500)
    process.run_epoch(made, 8)
    assert not made.fits(8, 16)
    process.free = 400
    assert made.fits(8, 16)


def test_batches_grow_although_validation_takes_much_and_stop_before_a_crash(monkeypatch, tmp_path):
    data, path = make_data(), tmp_path / "adaptive.jsonl"
    process = Process(monkeypatch, free=20)  # 12 more samples take 24 bytes

    class Use(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            process.use(100 + 2 * data.batch_size)

        def on_test_begin(self, logs=None):
            process.use(5000)

    options = {"epochs": 6, "verbose": 0, "validation_data": make_data(seed=4)}
    callbacks = [adaptive(data, log_path=path), Use()]
    history = make_model().fit(data, callbacks=callbacks, **options).history
    assert history["batch_size"] == [6, 6, 12, 12, 12, 12]
    assert "not expected to fit memory" in path.read_text().splitlines()[3]


STATISTICS = "anon 300, file 600, shmem 50, inactive_anon 120, inactive_file 350, active_file 200, "
STATISTICS = (STATISTICS + "slab 20, ").replace(", ", "\n")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("limit", "left"), [("1000", 650), ("max", None), ("1000000000000", None)])
def test_what_is_free(monkeypatch, tmp_path, limit, left, ranks):
    """The page cache of a container can be had, and ranks of a host share what is free."""
    files = {"memory.max": limit, "memory.current": "900", "memory.stat": STATISTICS}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "meminfo").write_text("MemTotal: 200 kB\nMemAvailable:  100 kB\n")
    monkeypatch.setattr(measures, "Path", lambda name: tmp_path / Path(name).name)
    with pretend_rank(local_size=ranks):
        assert measures._free_bytes() == (left or 102400) / ranks
