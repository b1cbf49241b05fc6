"""The comparison of two recordings, and what is taken from a timeline."""

import copy
import json

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


def swap_labels(content):
    """Exchange the labels of two slots, which keep their numbers."""
    first, second = content[CELL]["labels"]
    first[1], second[1] = second[1], first[1]


def swap_slots(content):
    first, second = content[CELL]["plan"]
    first[1], second[1] = second[1], first[1]
    swap_labels(content)


def split_by_rank(content):
    own = content[CELL]["weights"]
    content[CELL]["weights"] = [[f"rank {r} {name}", v] for r in (0, 1) for name, v in own]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_a_bit, "weights: top/kernel was float32[4, 4] bb, is float32[4, 4] bc"),
        (swap_slots, "plan: plan 0 slot 0 was 12 x 64 bytes, is 12 x 80 bytes"),
        (swap_labels, "labels: plan 0 slot 0 was top/kernel, is first/kernel"),
        (lambda content: content[CELL]["plan"].pop(), "plan 0 slot 1 (12 x 80 bytes) is gone"),
        (split_by_rank, "weights: first/kernel is now rank 0 first/kernel"),
        (lambda content: content.pop(CELL), "cell: missing in this checkout"),
        (lambda content: content.update({CELL: {"error": "why"}}), "failed in this checkout: why"),
    ],
)
def test_a_difference_is_named_and_ends_with_1(tmp_path, capsys, change, words):
    code, text = run(tmp_path, capsys, change)
    assert code == 1
    assert f"DIFFERENT {CELL}\n" in text and words in text
    assert text.count("equal ") == len(CELLS) - 1 and "10 cells, 1 wrong" in text


def test_equal_recordings_and_expected_differences_end_with_0(tmp_path, capsys):
    code, text = run(tmp_path, capsys, lambda content: None)
    assert code == 0 and text.count("equal ") == len(CELLS) and "DIFFERENT" not in text
    code, text = run(tmp_path, capsys, change_a_bit, "--expect", f"lstm/*  {CELL}")
    assert code == 0 and f"expected  {CELL}\n" in text and "top/kernel was" in text
    for change, pattern, expected in (
        (swap_labels, "*:labels", 0),
        (swap_slots, "*:labels", 1),  # says nothing of other sections
        (change_a_bit, "resnet/*", 1),
    ):
        assert run(tmp_path, capsys, change, "--expect", pattern)[0] == expected
    with pytest.raises(SystemExit):  # it names no cell
        run(tmp_path, capsys, change_a_bit, "--expect", "vgg/alreduce/2")


def test_slots_of_a_timeline_are_in_the_order_of_the_plan():
    """Events come as collectives end; ranks number their plans themselves."""
    events = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}}]
    for rank, plan in ((0, 4), (1, 9)):
        for execution in (1, 0):
            bars = [(plan + 1, 0, 8, "call"), (plan, 1, 16, "first"), (plan, 0, 32, "last")]
            for own, slot, size, name in [*bars, (-1, 0, 99, "eager collective")]:
                details = {"plan": own, "slot": slot, "execution": execution, "bytes": size}
                events.append({"ph": "X", "pid": rank, "name": name, "args": details})
    assert replay_cells.slots_of({"traceEvents": events}, 2) == [
        ("plan 0 slot 0", "2 x 32 bytes", "last"),
        ("plan 0 slot 1", "2 x 16 bytes", "first"),
        ("plan 1 slot 0", "2 x 8 bytes", "call"),
    ]


def test_digests_tell_bits_and_shapes_apart():
    zeros = np.zeros((2, 3), "float32")
    others = [-zeros, zeros.T.copy(), zeros.astype("int32"), np.nextafter(zeros, 1)]
    assert len({replay_cells.digest(array) for array in (zeros, *others)}) == 5
    assert replay_cells.digest(zeros) == replay_cells.digest(zeros.copy())
