"""Files of checkpoints: complete or not there, never half-loaded."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import tfscale
from tests.unit.checkpoint_model import refuse
from tfscale.checkpoints import files as module
from tfscale.checkpoints import list_checkpoints
from tfscale.checkpoints.files import (
    DamagedError,
    Part,
    UnreadableError,
    check_file,
    delete_all,
    folder_name,
    prune,
    read_manifest,
    set_aside,
    write_part,
)
from tfscale.checkpoints.saver import Saver
from tfscale.checkpoints.snapshot_restore import Reader

RUN = "0123abcd"


def write(directory: Path, step: int, size: int = 2, ranks=None, run: str = RUN) -> Path:
    folder = directory / folder_name(step, run)
    for rank in range(size) if ranks is None else ranks:
        info = {"run": run, "step": step, "size": size, "groups": [list(range(size))]}
        arrays = {"weight/0": np.arange(40.0) + rank, "seed/0": np.array([rank, 3], np.uint32)}
        write_part(folder, rank, Part(info, arrays))
    return folder


def test_arrays_of_all_types_come_back(tmp_path):
    arrays = [
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.array(7, np.int64),
        np.zeros((0, 4), np.float32),
        np.arange(5).astype(ml_dtypes.bfloat16),
        np.array([True, False]),
        np.array(0.5, ml_dtypes.float8_e4m3fn),
        np.arange(3).astype(ml_dtypes.float8_e4m3b11fnuz),  # no type of safetensors
        np.array([["one", ""], ["two", "three"]]),
        np.arange(4, dtype=">i4"),
        np.arange(12.0).reshape(3, 4).T,
    ]
    named = {f"a/{i}": array for i, array in enumerate(arrays)}
    write_part(tmp_path, 3, Part({"x": [1, None, "y"]}, named))
    manifest = read_manifest(tmp_path, 3)
    check_file(tmp_path, manifest)
    assert manifest["info"] == {"x": [1, None, "y"]}
    part = Part.stored(tmp_path, manifest)
    assert set(part.arrays) == set(named)
    for name, array in named.items():
        assert part.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(part.arrays[name], array)
        np.testing.assert_array_equal(part.slice(name, 1, 3), array.reshape(-1)[1:3])
    with pytest.raises(DamagedError, match="rank-00003"):
        part.arrays["b"]
    with pytest.raises(TypeError, match="Received: a"):
        write_part(tmp_path / "new", 0, Part({}, {"a": np.array([print], dtype=object)}))
    assert list((tmp_path / "new").iterdir()) == []


def test_the_format_is_that_of_safetensors(tmp_path):
    """Length and text of a header in JSON, then the bytes of the arrays in its order."""
    write_part(tmp_path, 0, Part({}, {"x": np.arange(4, dtype=np.int32), "y": np.zeros(1)}))
    content = (tmp_path / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0 and json.loads(content[8 : 8 + length]) == {
        "__metadata__": {},
        "x": {"dtype": "I32", "shape": [4], "data_offsets": [0, 16]},
        "y": {"dtype": "F64", "shape": [1], "data_offsets": [16, 24]},
    }
    assert content[8 + length :] == np.arange(4, dtype=np.int32).tobytes() + bytes(8)


def test_files_cut_and_flipped_at_random_places_are_refused(tmp_path):
    """300 places in manifests and arrays; each is found by the share that checks the file."""
    files = sorted(write(tmp_path, 7, size=3).iterdir())
    assert len(files) == 6
    dice = random.Random(5)
    for number in range(300):
        path = dice.choice(files)
        original = path.read_bytes()
        content, place = bytearray(original), dice.randrange(len(original))
        if number % 3 == 0:
            content = content[:place]
        else:
            content[place] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
        (found,) = list_checkpoints(tmp_path)
        errors = []
        for share in range(3):
            try:
                found.check((share, 3))
            except DamagedError as error:
                errors.append(str(error))
        assert errors and all("rank-" in error for error in errors), (path, place)
        path.write_bytes(original)
    assert list_checkpoints(tmp_path)[0].check()


def test_missing_and_foreign_parts_are_refused(tmp_path):
    folder = write(tmp_path, 7)
    (folder / "rank-00001.safetensors").unlink()
    with pytest.raises(DamagedError, match="rank-00001.safetensors: No such file"):
        list_checkpoints(tmp_path)[0].check((0, 2))  # also by the rank that checks another file
    other = write(tmp_path / "other", 7, ranks=[1], run="ffffffff")
    for file in other.iterdir():
        shutil.copy(file, folder)
    with pytest.raises(DamagedError, match="ranks 0 and 1 do not belong together"):
        list_checkpoints(tmp_path)[0].check()


def test_unfinished_is_no_checkpoint(tmp_path):
    write(tmp_path, 5, size=12, ranks=[2])
    (tmp_path / folder_name(9, RUN)).mkdir()
    newest, other = list_checkpoints(tmp_path)
    assert (newest.step, newest.is_finished, other.is_finished) == (9, False, False)
    assert "no rank" in newest.why_unfinished() and "3 more of 12" in other.why_unfinished()
    assert list_checkpoints(tmp_path / "none") == []


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    folder = write(tmp_path, 5)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def fill(arrays):
        yield b"some"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_blocks", fill)
    for step in (5, 6):
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, step)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert list((tmp_path / folder_name(6, RUN)).iterdir()) == []
    assert list_checkpoints(tmp_path)[1].check()


WRITE_ON = """
import sys, numpy as np
from pathlib import Path
from tfscale.checkpoints.files import Part, write_part
directory = Path(sys.argv[1])
for step in range(100000):
    info = {"run": "00000000", "step": step, "size": 2, "groups": [[0, 1]]}
    for rank in range(2):
        arrays = {"a": np.full(100_000, step, np.float64)}
        write_part(directory / f"step-{step:010d}-00000000", rank, Part(info, arrays))
    print(step, flush=True)
"""


def test_killed_while_writing(tmp_path):
    """Whatever moment SIGKILL comes at, what counts as finished is sound, and nothing is lost."""
    dice = random.Random(2)
    n_unfinished = 0
    for number in range(12):
        command = [sys.executable, "-c", WRITE_ON, str(tmp_path / f"{number}")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(dice.uniform(0.0, 0.1))
        child.send_signal(signal.SIGKILL)
        told = 1 + child.stdout.read().count("\n")  # with line 0, which was read above
        child.wait()
        found = list_checkpoints(tmp_path / f"{number}")
        finished = [f for f in found if f.is_finished]
        assert len(finished) >= told
        for checkpoint in finished:
            for manifest in checkpoint.check():
                assert np.all(Part.stored(checkpoint.path, manifest).arrays["a"] == checkpoint.step)
        n_unfinished += len(found) - len(finished)
        shutil.rmtree(tmp_path / f"{number}")
    assert n_unfinished  # some were hit within a checkpoint


def test_keep(tmp_path, monkeypatch):
    """Of other runs nothing unfinished stays: on a full disk each start would leave some more."""
    for step in (10, 20, 30, 40):
        write(tmp_path, step)
    write(tmp_path, 15, ranks=[0])  # never finished
    for run in ("11111111", RUN):  # of another run, and being written
        write(tmp_path, 50, ranks=[1], run=run)
    (tmp_path / folder_name(60, "22222222")).mkdir()
    prune(tmp_path, 2, {RUN})
    found = list_checkpoints(tmp_path)
    names = [folder_name(step, RUN) for step in (50, 40, 30)]
    assert [f.path.name for f in found] == names and [f.step for f in found] == [50, 40, 30]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", mock.Mock(side_effect=PermissionError))
        assert set_aside(found[1].path) is None and found[1].path.exists()
    new = set_aside(found[1].path)
    assert new.name == f"damaged-{folder_name(40, RUN)}"
    prune(tmp_path, 1, {RUN})
    assert [f.step for f in list_checkpoints(tmp_path)] == [50, 30] and new.exists()


def test_a_link_to_an_archive_is_read_and_neither_counted_nor_deleted(tmp_path):
    folder, archive = tmp_path / "run", write(tmp_path / "archive", 5)
    before = {path.name: path.read_bytes() for path in archive.iterdir()}
    for step in (10, 20, 30):
        write(folder, step)
    write(folder, 40, ranks=[1])
    link = folder / folder_name(5, RUN)
    link.symlink_to(archive, target_is_directory=True)
    prune(folder, 2, {RUN})
    found = list_checkpoints(folder)
    assert [f.step for f in found] == [40, 30, 20, 5] and found[-1].check()
    delete_all(folder)
    assert list(folder.iterdir()) == [link]
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == before
    link.unlink()
    delete_all(folder)
    delete_all(folder)
    assert not folder.exists()


def test_nothing_is_deleted_that_cannot_be_listed(tmp_path, monkeypatch):
    folders = [write(tmp_path, step) for step in (10, 20, 30, 40)]
    refuse(monkeypatch, errno.EIO, folders[0], folders[2])
    seen = list_checkpoints(tmp_path)
    assert [found.is_finished for found in seen] == [True, False, True, False]
    with pytest.raises(UnreadableError, match="Input/output error"):
        seen[1].check()
    monkeypatch.undo()  # from now on they could be
    monkeypatch.setattr(module, "list_checkpoints", lambda directory: seen)
    prune(tmp_path, 1, {RUN})
    monkeypatch.undo()
    assert [f.step for f in list_checkpoints(tmp_path)] == [40, 30, 10]
    refuse(monkeypatch, errno.EIO, tmp_path)
    prune(tmp_path, 1, {RUN})
    with pytest.raises(UnreadableError, match="Input/output error"):
        list_checkpoints(tmp_path)
    monkeypatch.undo()
    prune(tmp_path, 1, {RUN})
    assert [f.step for f in list_checkpoints(tmp_path)] == [40]


def test_what_cannot_be_deleted_stays(tmp_path, monkeypatch):
    """Another user's, say: rank 0 alone deletes, and the others would wait for it."""
    for step in (10, 20):
        write(tmp_path, step)
    monkeypatch.setattr(os, "unlink", mock.Mock(side_effect=PermissionError))
    prune(tmp_path, 1, {RUN})
    assert [f.is_finished for f in list_checkpoints(tmp_path)] == [True, True]


def test_parts_are_put_together_and_cut(tmp_path):
    cuts = [(0, 3), (3, 3), (3, 10)]
    whole = np.arange(10.0)
    for rank, (start, stop) in enumerate(cuts):
        info = {"groups": [[0, 1, 2]], "ranges": {"0/1": [start, stop]}}
        write_part(tmp_path, rank, Part(info, {"part0/1": whole[start:stop]}))
    reader = Reader([Part.stored(tmp_path, read_manifest(tmp_path, rank)) for rank in range(3)])
    np.testing.assert_array_equal(reader.slot("0/1", [0, 1, 2], None), whole)
    for want in ((0, 10), (2, 5), (3, 3), (4, 9), (0, 1)):
        np.testing.assert_array_equal(reader.slot("0/1", [0, 1, 2], want), whole[want[0] : want[1]])
    with pytest.raises(DamagedError, match="no rank wrote optimizer variable 0/2"):
        reader.slot("0/2", [0, 1, 2], None)
    for ranks in ([1, 2], [0, 1]):
        with pytest.raises(DamagedError, match="0/1 do not fit together"):
            reader.slot("0/1", ranks, (0, 10))


def test_means(tmp_path):
    write(tmp_path, 1)
    (found,) = list_checkpoints(tmp_path)
    reader = Reader([Part.stored(found.path, manifest) for manifest in found.check()])
    mean = reader.mean([0, 1], lambda rank: reader.get(rank, "weight/0"))
    np.testing.assert_array_equal(mean, np.arange(40.0) + 0.5)
    seeds = reader.mean([1, 0], lambda rank: reader.get(rank, "seed/0"))
    np.testing.assert_array_equal(seeds, [1, 3])
    third = reader.mean([0, 0, 0], lambda rank: np.array([0.1], np.float32))
    assert third.dtype == np.float32 and third[0] == np.float32(0.1)


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_the_saver_tells_what_went_wrong_once(tmp_path, monkeypatch, is_asynchronous):
    tfscale.init()
    saver = Saver(tmp_path, 1, is_shared=True, is_asynchronous=is_asynchronous)
    part = Part({"run": RUN, "step": 4, "size": 1, "groups": [[0]]}, {})
    saver.start(part, RUN)
    assert saver.wait() == "" and list_checkpoints(tmp_path)[0].is_finished
    monkeypatch.setattr(module, "write_part", mock.Mock(side_effect=OSError("full")))
    saver.start(part, RUN)
    assert saver.wait() == "OSError: full"
    assert saver.wait() == "" and not saver.has_failed
