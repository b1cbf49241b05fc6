"""StepCount: an integer that is looked up at each use, in every way Keras uses one."""

import copy
import math
import numbers
import pickle

import keras
import numpy as np
import pytest

from tfscale.data.slices import StepCount


def test_follows_its_value():
    count = StepCount(4)
    kept = count
    assert list(range(kept)) == [0, 1, 2, 3]
    count.value = 2
    assert list(range(kept)) == [0, 1]
    assert (kept or -1) is count
    count.value = 0
    assert (kept or -1) == -1


def test_behaves_as_an_integer():
    count = StepCount(12)
    assert isinstance(count, numbers.Integral)
    assert (int(count), float(count), repr(count), f"{count:03d}", "%d" % count) == (  # noqa: UP031
        12, 12.0, "12", "012", "12",
    )  # fmt: skip
    assert count == 12 and count == 12 and count != 11 and count == StepCount(12)
    assert count > 0 and count > 0 and count >= 12 and count <= 12 and not count < 12
    assert (count + 1, 1 + count, count - 2, 14 - count, -count) == (13, 13, 10, 2, -12)
    assert (count * 2, 24 / count, count // 5, 26 % count, count / 8) == (24, 2.0, 2, 2, 1.5)
    assert math.log10(StepCount(100)) == 2 and np.log10(StepCount(100)) == 2
    assert min(2, count) == 2 and np.asarray(count) == 12
    assert copy.deepcopy(count) == 12 and pickle.loads(pickle.dumps(count)) == 12


def test_is_not_hashable_as_it_changes():
    with pytest.raises(TypeError, match="unhashable"):
        hash(StepCount(1))


@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_bar_shows_the_present_value(verbose, capsys):
    count = StepCount(4)
    bar = keras.utils.Progbar(target=count, verbose=verbose)
    count.value = 12
    for step in range(1, 13):
        bar.update(step, [("loss", 1.0)])
    shown = capsys.readouterr().out
    assert "12/12" in shown and "/4" not in shown
