"""The comparison of two recordings, and what is taken from a timeline."""

import copy
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import replay
import replay_cells

CELL = "vgg/allreduce/2"
CELLS = replay_cells.QUICK


def recording():
    """Return records of the quick cells, all alike."""
    record = {
        "plan": [["plan 0 slot 0", "12 x 64 bytes"], ["plan 0 slot 1", "12 x 80 bytes"]],
        "labels": [["plan 0 slot 0", "top/kernel"], ["plan 0 slot 1", "first/kernel"]],
        "weights": [["first/kernel", "float32[4, 5] aa"], ["top/kernel", "float32[4, 4] bb"]],
        "optimizer": [["0 (iteration)", "int64[] cc"], ["1 (momentum)", "float32[4, 5] dd"]],
    }
    return {cell: copy.deepcopy(record) for cell in CELLS}


def run(tmp_path, capsys, change, *options):
    """Compare a recording with a changed one; return exit code and output."""
    paths = []
    for name, content in (("old", recording()), ("new", recording())):
        if name == "new":
            change(content)
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps({"cells": content}))
    code = replay.main(["--files", *map(str, paths), "--quick", *options])
    return code, capsys.readouterr().out


def change_a_bit(content):
    content[CELL]["weights"][1][1] = "float32[4, 4] bc"


def swap_slots(content, *sections):
    """Exchange two slots or their labels; they keep their numbers."""
    for section in sections or ("plan", "labels"):
        first, second = content[CELL][section]
        first[1], second[1] = second[1], first[1]


def swap_labels(content):
    swap_slots(content, "labels")


def split_by_rank(content):
    own = content[CELL]["weights"]
    content[CELL]["weights"] = [[f"rank {r} {name}", v] for r in (0, 1) for name, v in own]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_a_bit, "weights: top/kernel was float32[4, 4] bb, is float32[4, 4] bc"),
        (swap_slots, "plan: plan 0 slot 0 was 12 x 64 bytes, is 12 x 80 bytes"),
        (swap_slots, "labels: plan 0 slot 0 was top/kernel, is first/kernel"),
        (swap_labels, "labels: plan 0 slot 0 was top/kernel, is first/kernel"),
        (
            lambda content: content[CELL]["plan"].pop(),
            "plan: plan 0 slot 1 (12 x 80 bytes) is gone; 2 entries before, 1 now",
        ),
        (
            lambda content: content[CELL]["optimizer"][1].__setitem__(1, "float32[4, 5] de"),
            "optimizer: 1 (momentum) was float32[4, 5] dd, is float32[4, 5] de",
        ),
        (split_by_rank, "weights: first/kernel is now rank 0 first/kernel"),
        (lambda content: content.pop(CELL), "cell: missing in this checkout"),
        (
            lambda content: content.update({CELL: {"error": "ExchangeError: no reason"}}),
            "cell: failed in this checkout: ExchangeError: no reason",
        ),
    ],
)
def test_a_difference_is_named_and_ends_with_1(tmp_path, capsys, change, words):
    code, text = run(tmp_path, capsys, change)
    assert code == 1
    assert f"DIFFERENT {CELL}\n" in text and words in text
    assert text.count("equal ") == len(CELLS) - 1 and "10 cells, 1 wrong" in text


def test_equal_recordings_end_with_0(tmp_path, capsys):
    code, text = run(tmp_path, capsys, lambda content: None)
    assert code == 0
    assert text.count("equal ") == len(CELLS) and "DIFFERENT" not in text


def test_what_is_wrong_in_both_is_no_proof():
    lines, is_wrong = replay.compare({}, {}, [CELL], [])
    assert is_wrong and "missing in base" in lines[1]
    failed = {CELL: {"error": "no such option"}}
    assert replay.compare(failed, failed, [CELL], [])[1]


def test_expected_differences_are_shown_and_pass(tmp_path, capsys):
    code, text = run(tmp_path, capsys, change_a_bit, "--expect", f"lstm/*  {CELL}")
    assert code == 0
    assert f"expected  {CELL}\n" in text and "top/kernel was" in text
    for change, pattern, expected in (
        (swap_labels, "*:labels", 0),
        (swap_slots, "*:labels", 1),  # says nothing of other sections
        (change_a_bit, "*:labels", 1),
        (change_a_bit, "resnet/*", 1),
    ):
        assert run(tmp_path, capsys, change, "--expect", pattern)[0] == expected
    with pytest.raises(SystemExit):  # it names no cell
        run(tmp_path, capsys, change_a_bit, "--expect", "vgg/alreduce/2")


def bar(rank, plan, slot, execution, n_bytes, name):
    details = {"plan": plan, "slot": slot, "execution": execution, "bytes": n_bytes}
    return {"ph": "X", "pid": rank, "name": name, "args": details}


def test_slots_of_a_timeline_are_in_the_order_of_the_plan():
    """Events come as collectives end; ranks number their plans themselves."""
    events = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}}]
    for rank, first in ((0, 4), (1, 9)):
        for execution in (1, 0):
            events += [
                bar(rank, first + 1, 0, execution, 8, "call"),
                bar(rank, first, 1, execution, 16, "first"),
                bar(rank, first, 0, execution, 32, "last"),
                bar(rank, -1, 0, execution, 99, "eager collective"),
            ]
    assert replay_cells.slots_of({"traceEvents": events}, 2) == [
        ("plan 0 slot 0", "2 x 32 bytes", "last"),
        ("plan 0 slot 1", "2 x 16 bytes", "first"),
        ("plan 1 slot 0", "2 x 8 bytes", "call"),
    ]


def test_ranks_that_differ_are_recorded_each():
    """Rows of an embedding: each rank sends its own number of them in each step."""
    events = [bar(rank, 0, 0, n, 4 * (rank + n), "rows") for rank in (0, 1) for n in (1, 2, 3)]
    assert replay_cells.slots_of({"traceEvents": events}, 2) == [
        ("rank 0 plan 0 slot 0", "3 x 4,8,12 bytes", "rows"),
        ("rank 1 plan 0 slot 0", "3 x 8,12,16 bytes", "rows"),
    ]


def test_digests_tell_bits_and_shapes_apart():
    zeros = np.zeros((2, 3), "float32")
    others = [-zeros, zeros.T.copy(), zeros.astype("int32"), np.nextafter(zeros, 1)]
    assert len({replay_cells.digest(array) for array in (zeros, *others)}) == 5
    assert replay_cells.digest(zeros) == replay_cells.digest(zeros.copy())


def test_standard_cells_have_each_pair_on_two_numbers_of_ranks():
    names = replay_cells.standard_cells()
    assert set(replay_cells.QUICK) < set(names) < set(replay_cells.all_cells())
    ranks = {}
    for name in names:
        pair, _, n_ranks = name.rpartition("/")
        ranks.setdefault(pair, set()).add(n_ranks)
    for pair, found in ranks.items():
        assert "4" in found if "local" in pair else {"2"} < found and found & {"3", "4"}, pair
    assert {name.rpartition("/")[2] for name in names} == set("1234")


def record(tree, cells):
    return {name: own for job in replay.record(tree, cells, "test") for name, own in job.items()}


@pytest.fixture
def one_process(tmp_path, monkeypatch):
    """A script in the place of the cells, which dies in those of an LSTM."""
    script = tmp_path / "cells.py"
    script.write_text(
        "import json, sys\n"
        "for cell in sys.argv[2:]:\n"
        "    if cell.startswith('lstm'):\n"
        "        raise SystemExit('no memory left')\n"
        "    with open(sys.argv[1], 'a') as file:\n"
        "        file.write(json.dumps({'cell': cell, 'cpu_s': 1.0}) + '\\n')\n"
    )
    monkeypatch.setattr(replay, "RECORDER", script)
    monkeypatch.setattr(replay, "mpiexec", lambda n_ranks: [])


def test_jobs_that_die_or_are_silent(tmp_path, monkeypatch, one_process):
    cells = ["vgg/auto/2", "lstm/auto/2", "edsr/auto/2", "vgg/auto/3"]
    found = record(tmp_path, cells)
    assert list(found) == cells
    assert "no memory left" in found["lstm/auto/2"]["error"]
    assert all("error" not in found[cell] for cell in cells if cell != "lstm/auto/2")
    # Longer than the limit of a cell, which the recorder must end.
    replay.RECORDER.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(replay, "SILENCE_S", 0.5)
    assert "no cell within" in record(tmp_path, cells[:1])["vgg/auto/2"]["error"]


def test_recordings_of_another_recorder_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "FOLDER", tmp_path)
    replay.Recording("abc").add({CELL: {"plan": []}, CELLS[1]: {"error": "hung"}})
    assert replay.Recording("abc").cells == {CELL: {"plan": []}}
    changed = tmp_path / "cells.py"
    monkeypatch.setattr(replay, "RECORDER", changed)
    source = Path(replay_cells.__file__).read_text()
    changed.write_text(f"{source}\n# a comment changes nothing\n")
    assert replay.Recording("abc").cells == {CELL: {"plan": []}}
    changed.write_text(source.replace("GLOBAL_BATCH = 12", "GLOBAL_BATCH = 24"))
    assert replay.Recording("abc").cells == {}


def test_a_commit_is_checked_out_and_removed(tmp_path, monkeypatch):
    """The library is shared while the C++ sources are equal, else built and kept."""
    root = tmp_path / "repository"
    for name, text in (
        ("custom_ops/one.cc", "one"),
        ("tfscale/__init__.py", "def mpi_built():\n    return True\n"),
        ("tools/build_native.py", "open('tfscale/_lib/libtfscale.so', 'w').write('built')\n"),
        ("tfscale/_lib/build.json", "{}"),
        (".gitignore", "*.so\nbuild/\n"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], cwd=root, check=True)
    (root / "tfscale/_lib/libtfscale.so").write_text("shared")
    monkeypatch.setattr(replay, "ROOT", root)
    monkeypatch.setattr(replay, "FOLDER", root / "build" / "replay")
    commit = replay._git("rev-parse", "HEAD")

    def library():
        with replay.checkout(commit) as tree:
            found = (tree / "tfscale/_lib/libtfscale.so").read_text()
        assert not tree.exists() and str(tree) not in replay._git("worktree", "list")
        return found

    assert library() == "shared"
    (root / "custom_ops/one.cc").write_text("two")
    assert library() == "built"
    (root / "tools/build_native.py").unlink()  # the library of that commit's sources is kept
    assert library() == "built"
