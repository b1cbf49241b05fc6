"""`tfscale.distribute`: files that each rank of an unchanged script makes, removes or downloads."""

import contextlib
import hashlib
import http.server
import io
import os
import shutil
import tempfile
import threading
import time
import urllib.request
import zipfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import outcome, require_error, shared_folder
from tests.parallel.cases_distribute import distributed
from tfscale.testing import require_close, require_identical

ROWS = np.random.default_rng(1).normal(size=(24, 4)).astype("float32")
LATER_S = 0.2  # between ranks, so that one finds what another has just made


def dense():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def run_as_program(text, **names):
    """Run the lines of a script, later on each rank than on the one before."""
    tfscale.barrier()  # as `init` at the start of a job: no rank is ahead of its beginning
    time.sleep(LATER_S * tfscale.rank())
    exec(compile(text, "program", "exec"), {"__name__": "__main__", **names})


# Downloads.


def archive():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as zipped:
        zipped.writestr("a.txt", "a" * 10000)
        zipped.writestr("b/c.txt", "c")
    return content.getvalue()


@contextlib.contextmanager
def slow_server(files):
    """Serve files on rank 0 in parts; yield the URL and the paths that were asked for."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            content = files.get(self.path.lstrip("/"))
            if content is None:
                time.sleep(2 * LATER_S)  # other ranks are waiting by then
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            for begin in range(0, len(content), len(content) // 4 + 1):
                self.wfile.write(content[begin : begin + len(content) // 4 + 1])
                time.sleep(LATER_S / 2)  # other ranks would find a part

        def log_message(self, *arguments):
            pass

    server, url = None, None
    if tfscale.rank() == 0:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield tfscale.broadcast_object(url), asked
        tfscale.barrier()
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()


@sizes(2, 3, timeout_s=120)
def case_a_file_is_downloaded_once():
    array = io.BytesIO()
    np.save(array, ROWS)
    files = {"d.npy": array.getvalue(), "z.zip": archive(), "other.npy": array.getvalue()}
    digest = hashlib.sha256(files["d.npy"]).hexdigest()
    with shared_folder() as folder, slow_server(files) as (url, asked), distributed():
        get_file = keras.utils.get_file
        for module in (
            "keras.src.datasets.mnist",
            "keras.src.datasets.imdb",
            "keras.src.utils.file_utils",
        ):
            assert __import__(module, fromlist=["get_file"]).get_file is get_file, module

        time.sleep(LATER_S * tfscale.rank() / 2)
        path = get_file("d.npy", f"{url}/d.npy", cache_dir=folder, file_hash=digest)
        require_identical([np.load(path)], [ROWS])
        path = get_file(origin=f"{url}/z.zip", cache_dir=folder, extract=True)
        assert (Path(path) / "b" / "c.txt").read_text() == "c"
        for _ in range(2):
            path = get_file("d.npy", f"{url}/d.npy", cache_dir=folder, force_download=True)
            require_identical([np.load(path)], [ROWS])
            tfscale.barrier()
        if tfscale.rank() == 1:  # one rank alone waits for no other
            get_file("other.npy", f"{url}/other.npy", cache_dir=folder)
        tfscale.barrier()
        text = outcome(lambda: get_file("no.npy", f"{url}/no.npy", cache_dir=folder))
        every = tfscale.allgather_object(text)
        assert all("404" in each for each in every), every
        wrong = outcome(
            lambda: get_file("w.npy", f"{url}/d.npy", cache_dir=folder, file_hash="0" * 64)
        )
        assert all("file hash does not match" in each for each in tfscale.allgather_object(wrong))
        time.sleep(LATER_S * tfscale.rank() / 2)
        own = folder / "own.npy"
        if not own.exists():  # as scripts do
            urllib.request.urlretrieve(f"{url}/other.npy", own)
        require_identical([np.load(own)], [ROWS])
        tfscale.barrier()
        if tfscale.rank() == 0:
            counts = {name: asked.count(f"/{name}") for name in ("z.zip", "no.npy")}
            assert counts == {"z.zip": 1, "no.npy": 1}, asked
            # Once, twice by force, and by ranks that come upon a wrong digest.
            assert 4 <= asked.count("/d.npy") <= 3 + tfscale.size(), asked
        assert not [name for name in os.listdir(folder) if ".rank" in name]


# Saves under names that differ.


@sizes(2, 3, timeout_s=120)
def case_each_rank_reads_what_it_has_saved():
    """Names that are drawn, or have the time in them."""
    with distributed():
        folder = Path(tempfile.mkdtemp())
        try:
            model = dense()
            callbacks = [
                keras.callbacks.CSVLogger(folder / "log.csv"),
                keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="loss"),
            ]
            model.fit(ROWS, ROWS[:, 0], epochs=2, callbacks=callbacks, verbose=0)
            predicted = model.predict(ROWS, verbose=0)
            model.save(folder / "m.keras")
            model.save_weights(folder / "m.weights.h5")
            model.export(folder / "exported", verbose=False)
            tf.saved_model.save(tf.Module(), folder / "module")
            tf.train.Checkpoint(model=model).save(folder / "checkpoint")
            tf.data.Dataset.from_tensor_slices(ROWS).save(str(folder / "data"))

            assert len((folder / "log.csv").read_text().splitlines()) == 3
            for name in ("m.keras", "best.keras"):
                loaded = keras.models.load_model(folder / name)
                require_close(loaded.predict(ROWS, verbose=0), predicted)
            other = dense()
            other.load_weights(folder / "m.weights.h5")
            require_identical(other.variables, model.variables)
            tf.saved_model.load(str(folder / "exported"))
            tf.saved_model.load(str(folder / "module"))
            rows = list(tf.data.Dataset.load(str(folder / "data")).as_numpy_iterator())
            require_identical([np.stack(rows)], [ROWS])
            latest = tf.train.latest_checkpoint(folder)
            tf.train.Checkpoint(model=other).restore(latest).expect_partial()
        finally:
            shutil.rmtree(folder)


@sizes(2, 3, timeout_s=120)
def case_shared_names_are_written_once():
    with shared_folder() as folder, distributed():
        model, data = dense(), tf.data.Dataset.from_tensor_slices(ROWS)
        for n_saves in (1, 2):
            data.save(str(folder / "data"))
            assert len(list(tf.data.Dataset.load(str(folder / "data")))) == 24, n_saves
        tf.saved_model.save(tf.Module(), str(folder / "module"))
        tf.saved_model.load(str(folder / "module"))
        path = tf.train.Checkpoint(model=model).write(str(folder / "written"))
        assert path == str(folder / "written"), path
        assert {p.name for p in folder.glob("written*")} == {
            "written.index",
            "written.data-00000-of-00001",
        }
        if tfscale.rank() == 0:
            (folder / "exists").write_text("")
        tfscale.barrier()
        text = "Could not write files. Received: rank 0: "
        require_error(lambda: data.save(str(folder / "exists" / "no")), "ExchangeError", text)


def case_a_manager_of_checkpoints():
    for exchange in ("allreduce", "sharded"):
        with shared_folder() as folder, distributed(exchange=exchange):
            model = dense()
            model.fit(ROWS, ROWS[:, 0], verbose=0)
            checkpoint = tf.train.Checkpoint(model=model, step=tf.Variable(0))
            manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
            for step in range(4):
                checkpoint.step.assign(step)
                path = manager.save()
                assert path == manager.latest_checkpoint == str(folder / f"ckpt-{step + 1}")
            assert manager.checkpoints == [str(folder / f"ckpt-{n}") for n in (3, 4)]
            tfscale.barrier()
            names = {p.name for p in folder.glob("ckpt*.index")}
            assert names == {"ckpt-3.index", "ckpt-4.index"}, names
            before = [v.numpy() for v in model.variables]
            model.fit(ROWS, ROWS[:, 0], verbose=0)
            checkpoint.restore(manager.latest_checkpoint)
            require_identical([v.numpy() for v in model.variables], before)
            assert int(checkpoint.step) == 3


# Caches.


@sizes(2, 3, timeout_s=120)
def case_caches_in_files():
    def fitted(data):
        keras.utils.set_random_seed(3)
        model = dense()
        model.fit(data.batch(6), epochs=3, verbose=0)
        return [v.numpy() for v in model.variables]

    rows = tf.data.Dataset.from_tensor_slices((ROWS, ROWS[:, 0]))
    with shared_folder() as folder, distributed():
        expected = fitted(rows)
        for name in ("first", "second"):  # of which the second reads a cache
            found = fitted(rows.cache(str(folder / "cache")))
            require_identical(found, expected)
            tfscale.barrier()
            assert (folder / "cache.index").exists(), name
        require_identical(fitted(rows.snapshot(str(folder / "snapshot"))), expected)
        require_identical(fitted(rows.cache()), expected)


# Folders.


MAKE = """
import os, pathlib
os.makedirs(folder / "a" / "b")
os.mkdir(folder / "c")
(folder / "d").mkdir()
(folder / "e" / "f").mkdir(parents=True)
os.makedirs(folder / "a", exist_ok=True)
"""
REMOVE = """
import os, shutil
if os.path.exists(folder / "old"):
    shutil.rmtree(folder / "old")
os.makedirs(folder / "old")
(folder / "old" / f"{rank}.txt").write_text("new")
"""
AT_ONCE = """
import os, shutil
shutil.rmtree(folder / "old", ignore_errors=True)
os.makedirs(folder / "old")
(folder / "old" / f"{rank}.txt").write_text("new")
"""


@sizes(2, 3, timeout_s=60)
def case_folders_are_made_and_removed_by_every_rank():
    rank = tfscale.rank()
    with shared_folder() as folder:
        if rank == 0:
            for name in ("old", "kept"):
                (folder / name).mkdir()
                (folder / name / "x.txt").write_text("old")
        tfscale.barrier()
        time.sleep(0.05)  # changes of folders have times in steps of some milliseconds
        with distributed():
            run_as_program(MAKE, folder=folder)
            assert (folder / "e" / "f").is_dir()
            for text in (f"os.mkdir(folder / {n!r})" for n in ("c", "kept")):
                found = outcome(
                    lambda text=text: run_as_program(f"import os\n{text}", folder=folder)
                )
                assert found.startswith("FileExistsError"), (text, found)  # as in one process
            assert outcome(lambda: os.mkdir(folder / "d")).startswith(
                "FileExistsError"
            )  # a library
            run_as_program(REMOVE, folder=folder, rank=rank)
            tfscale.barrier()
            expected = {f"{each}.txt" for each in range(tfscale.size())}
            assert set(os.listdir(folder / "old")) == expected, os.listdir(folder / "old")
            run_as_program("import shutil\nshutil.rmtree(folder / 'old')", folder=folder)
            tfscale.barrier()
            assert not (folder / "old").exists()
            tfscale.barrier()  # a rank that is faster makes it again
            assert not [name for name in os.listdir(folder) if "removed" in name]
        for _ in range(20):
            if rank == 0:
                (folder / "old").mkdir(exist_ok=True)
                (folder / "old" / "x.txt").write_text("old")
            tfscale.barrier()  # the folder is older than the job, on every rank
            time.sleep(0.02)  # see above
            with distributed():
                tfscale.barrier()
                names = {"__name__": "__main__", "folder": folder, "rank": rank}
                exec(compile(AT_ONCE, "program", "exec"), names)
                tfscale.barrier()
                assert set(os.listdir(folder / "old")) == expected, os.listdir(folder / "old")
                tfscale.barrier()
