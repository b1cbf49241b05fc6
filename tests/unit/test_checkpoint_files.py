"""Files of checkpoints: complete or not there, never half-loaded."""

import contextlib
import copy
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfscale
from tests.unit.checkpoint_model import info_of, refuse
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
from tfscale.checkpoints.variables import mean_of

RUN = "0123abcd"


def write(directory: Path, step: int, size: int = 2, ranks=None, run: str = RUN) -> Path:
    folder = directory / folder_name(step, run)
    for rank in range(size) if ranks is None else ranks:
        arrays = {"weight/0": np.arange(40.0) + rank, "seed/0": np.array([rank, 3], np.uint32)}
        info = info_of(step, size, run, [("dense/kernel", arrays["weight/0"])])
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
    with pytest.raises(DamagedError, match="rank-00001.manifest is of step 7 of run 'ffffffff'"):
        list_checkpoints(tmp_path)[0].check()
    write(tmp_path, 7, size=3, ranks=[1])
    with pytest.raises(DamagedError, match="ranks 0 and 1 do not belong together"):
        list_checkpoints(tmp_path)[0].check()


def test_a_checkpoint_under_another_name_is_damaged_and_not_counted(tmp_path):
    """After `mv`, each start would resume from its step, and `keep` take it for the newest."""
    folders = [write(tmp_path, step) for step in (10, 20, 30)]
    renamed = folders[0].rename(tmp_path / folder_name(99, RUN))
    shutil.copytree(folders[1], tmp_path / folder_name(20, "ffffffff"))  # of another run
    newest, second, *others = list_checkpoints(tmp_path)
    assert newest.path == renamed and newest.is_finished
    text = f"rank-00000.manifest is of step 10 of run '{RUN}', not of {renamed.name}"
    assert newest.damage == text
    with pytest.raises(DamagedError, match=text):
        newest.check()
    assert second.path == folders[2] and second.check() and not second.damage
    assert [bool(found.damage) for found in others if "ffffffff" in found.path.name] == [True]
    write(tmp_path, 40)
    prune(tmp_path, 2, {RUN})
    assert [found.step for found in list_checkpoints(tmp_path)] == [99, 40, 30]
    swapped = [tmp_path / folder_name(step, RUN) for step in (40, 30)]
    swapped[0].rename(tmp_path / "aside")
    swapped[1].rename(swapped[0])
    (tmp_path / "aside").rename(swapped[1])
    assert all(found.damage for found in list_checkpoints(tmp_path))


def test_parts_of_another_step_in_a_folder_are_damage(tmp_path):
    older, newer = write(tmp_path, 10), write(tmp_path, 20)
    for file in older.glob("rank-00001.*"):
        shutil.copy(file, newer)
    with pytest.raises(DamagedError, match="rank-00001.manifest is of step 10 .* not of step-0*20"):
        list_checkpoints(tmp_path)[0].check()


def seal(folder: Path, text: bytes, rank: int = 0) -> None:
    """Write a manifest whose checksum fits."""
    digest = hashlib.sha256(text + b"\n").hexdigest().encode()
    (folder / f"rank-{rank:05d}.manifest").write_bytes(text + b"\n" + digest + b"\n")


def require_damage(tmp_path: Path) -> None:
    """Require that the newest checkpoint is refused, at once, and `keep` does not count it."""
    newest, older = list_checkpoints(tmp_path)
    with pytest.raises(DamagedError):
        newest.check()
    assert newest.damage and newest.is_finished and older.check()
    prune(tmp_path, 1, {RUN})
    assert list_checkpoints(tmp_path) == [newest, older]


MALFORMED = {
    "size": [10**9, 0, -1, "2", 2.0, True, None, [2], 10**400],
    "step": [-20, "20", 20.0, None, 10**20],
    "run": [3, "../../x", None, "x" * 10**5],
    "groups": [[], [[0]], [[0, 1], [1]], [[0, 2]], 5, [0, 1], None, [["0", "1"]]],
    "position": [None, {}, [], {"epoch": 0}, 7],
    "is_end": [0, "no"],
    "weights": [5, [["kernel"]], [["kernel", [4, -1]]], "no"],
    "rules": [[{}], None, [{"class": 1, "n": 2, "slots": []}]],
    "trained": [[[1]], [[-1]], [["0"]], None],
    "ranges": [[], {"0/1": 5}, {"0/1": [3]}, {"x": None}, {"0/weight7": None}],
    "residuals": [{"0/9": [[], 1.0]}, {"0/0": []}],
    "accumulated": [[0], "none"],
    "n_quantized": [[0], None],
    "random": [None, {}, {"python": [3, [], None], "numpy": {}}],
    "metrics": [[["sum"]], {}],
    "callbacks": [[5], [{"kind": "A"}], {}],
    "keras_callbacks": [[{"kind": "A", "numbers": {"best": "low"}}]],
}


def test_a_manifest_that_is_well_sealed_and_malformed_is_damage(tmp_path):
    write(tmp_path, 10)
    folder = write(tmp_path, 20)
    manifests = [read_manifest(folder, rank) for rank in range(2)]

    def put(change):
        for rank, manifest in enumerate(manifests):
            manifest = copy.deepcopy(manifest)
            change(manifest)
            seal(folder, json.dumps(manifest).encode(), rank)

    put(lambda manifest: None)
    assert list_checkpoints(tmp_path)[0].check()
    for name, values in MALFORMED.items():
        for value in values:
            put(lambda manifest, name=name, value=value: manifest["info"].update({name: value}))
            require_damage(tmp_path)
        if name not in ("trained", "residuals", "n_quantized"):  # which older ones do not have
            put(lambda manifest, name=name: manifest["info"].pop(name))
            require_damage(tmp_path)
    for name, value in (("epoch", -5), ("step", 1.5), ("n_steps", 19), ("data", 5), ("more", 1)):
        put(lambda m, name=name, value=value: m["info"]["position"].update({name: value}))
        require_damage(tmp_path)
    for name in manifests[0]:
        put(lambda manifest, name=name: manifest.pop(name))
        require_damage(tmp_path)
    for file in ("../rank-00000.safetensors", "/etc/passwd", 5, None):
        put(lambda manifest, file=file: manifest.update(file=file))
        require_damage(tmp_path)
    for weights in ([["kernel", [39]]], [["kernel", [40]]] * 2):  # the arrays are others
        put(lambda manifest, weights=weights: manifest["info"].update(weights=weights))
        with pytest.raises(DamagedError, match="rank-00000.safetensors has no weight kernel of"):
            list_checkpoints(tmp_path)[0].check()
    state = {"deep": json.loads("[" * 300 + "]" * 300)}
    put(lambda manifest: manifest["info"].update(callbacks=[{"kind": "A", "state": state}]))
    require_damage(tmp_path)
    numpy_state = copy.deepcopy(manifests[0]["info"]["random"])
    numpy_state["numpy"]["state"]["pos"] = 10**6
    put(lambda manifest: manifest["info"].update(random=numpy_state))
    require_damage(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"5",
        b"[]",
        b"NaN",
        b"\xff\xfe{",
        b"[" * 10**5,
        b'{"a":' * 10**5,
        b'"\x80"',
    ],
    ids=lambda text: str(text[:6]),
)
def test_a_manifest_that_is_no_object_is_damage(tmp_path, text):
    write(tmp_path, 10)
    folder = write(tmp_path, 20)
    for rank in range(2):
        seal(folder, text, rank)
    require_damage(tmp_path)


_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.just(10**300)
)
_JSON = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_any_value_at_any_place_is_refused_or_harmless(data):
    """Values replaced at random in a whole manifest: no other error than damage."""
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), 20, size=1)
        manifest = read_manifest(folder, 0)
        at, key = manifest, data.draw(st.sampled_from(sorted(manifest)))
        while isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        at[key] = data.draw(_JSON)
        seal(folder, json.dumps(manifest).encode())
        (found,) = list_checkpoints(name)
        with contextlib.suppress(DamagedError):
            (checked,) = found.check()
            part = Part.stored(folder, checked)
            assert (part.info["step"], part.info["run"]) == (20, RUN)
            assert part.arrays["weight/0"].shape == (40,)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_any_header_of_arrays_is_refused_or_harmless(data):
    """The header of the arrays replaced at random, under checksums that fit."""
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), 20, size=1)
        path, manifest = folder / "rank-00000.safetensors", read_manifest(folder, 0)
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        if data.draw(st.booleans()):
            entry = header["weight/0"]
            entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(_JSON)
            header["__metadata__"] = data.draw(st.just({}) | _JSON)
            text = json.dumps(header).encode()
        else:
            text = data.draw(st.binary(max_size=60))
        length = data.draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
        content = length.to_bytes(8, "little") + text + content[-400:]
        path.write_bytes(content)
        manifest |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        seal(folder, json.dumps(manifest).encode())
        (found,) = list_checkpoints(name)
        with contextlib.suppress(DamagedError):
            (checked,) = found.check()
            for array in Part.stored(folder, checked).arrays.values():
                assert array.nbytes <= len(content)


@pytest.mark.parametrize("kind", ["manifest", "safetensors"])
@pytest.mark.parametrize("what", ["pipe", "device", "folder", "loop"])
def test_a_pipe_or_device_in_place_of_a_file_is_damage(tmp_path, kind, what):
    """Reading a pipe, or /dev/zero, would never end."""
    write(tmp_path, 10)
    folder = write(tmp_path, 20)
    for rank in range(2):
        path = folder / f"rank-{rank:05d}.{kind}"
        path.unlink()
        if what == "pipe":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero" if what == "device" else path)
    newest, older = list_checkpoints(tmp_path)
    with pytest.raises(DamagedError, match="rank-00000"):
        newest.check()
    assert older.check()


def test_digits_of_other_scripts_are_no_names_of_parts(tmp_path):
    folder = write(tmp_path, 20)
    (folder / "rank-0000\u0661.manifest").write_bytes(b"")
    (tmp_path / folder.name.replace("20", "2\u0660")).mkdir()
    (found,) = list_checkpoints(tmp_path)
    assert found.check()


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
import json, sys, numpy as np
from pathlib import Path
from tfscale.checkpoints.files import Part, write_part
directory, info = Path(sys.argv[1]), json.loads(sys.argv[2])
for step in range(100000):
    info["step"] = info["position"]["n_steps"] = step
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
        words = [str(tmp_path / f"{number}"), json.dumps(info_of(0, run="00000000"))]
        command = [sys.executable, "-c", WRITE_ON, *words]
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


def test_means():
    values = np.arange(40.0)
    np.testing.assert_array_equal(mean_of([values, values + 1]), values + 0.5)
    seeds = [np.array([rank, 3], np.uint32) for rank in (1, 0)]
    np.testing.assert_array_equal(mean_of(seeds), [1, 3])
    third = mean_of([np.array([0.1], np.float32)] * 3)
    assert third.dtype == np.float32 and third[0] == np.float32(0.1)


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_the_saver_tells_what_went_wrong_once(tmp_path, monkeypatch, is_asynchronous):
    tfscale.init()
    saver = Saver(tmp_path, 1, is_shared=True, is_asynchronous=is_asynchronous)
    part = Part(info_of(4, size=1), {})
    saver.start(part, RUN)
    assert saver.wait() == "" and list_checkpoints(tmp_path)[0].is_finished
    monkeypatch.setattr(module, "write_part", mock.Mock(side_effect=OSError("full")))
    saver.start(part, RUN)
    assert saver.wait() == "OSError: full"
    assert saver.wait() == "" and not saver.has_failed
