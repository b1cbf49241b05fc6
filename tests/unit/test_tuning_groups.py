"""Choosing the number of groups from distances."""

import json

import numpy as np
import pytest

import tfscale
from tfscale.errors import ConfigError
from tfscale.tuning.groups import GroupProbe, advise, as_text, write
from tfscale.tuning.groups_command import check_groups
from tfscale.tuning.groups_probe import enlarge


def probes(*distances):
    """Return probes of 2, 4, 8 ... groups whose settled distances are given."""
    return [GroupProbe(2 ** (i + 1), 8, 0.1, (0.1 * d, d, d), 1.0) for i, d in enumerate(distances)]


def test_doubling_is_accepted_while_the_distance_doubles():
    assert advise(probes(1.0, 1.8, 2.5)).groups == 4
    assert advise(probes(1.0, 1.6)).groups == 2
    assert advise(probes(1.0, 2.0, 4.0)).groups == 8


def test_the_settled_distance_counts():
    assert GroupProbe(2, 8, 0.1, (0.1, 0.2, 1.0, 1.2), 0.0).distance == 1.1


def test_text_and_files(tmp_path):
    measured = probes(1.0, 1.8, 2.5)
    advice = advise(measured)
    assert "Use 4 groups: D(8) is 0.69 of twice D(4)" in as_text(measured, advice)
    write(measured, advice, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "groups.json").read_text())
    assert content["advice"]["groups"] == 4 and len(content["probes"]) == 3
    assert (tmp_path / "out" / "groups.png").stat().st_size > 1000


def test_numbers_of_groups():
    assert check_groups([1, 2, 4]) == [2, 4]
    with pytest.raises(ConfigError, match="must double from one to the next"):
        check_groups([2, 3])


def test_each_group_gets_the_batches_of_the_script():
    data = tfscale.data.GlobalBatches(np.zeros((64, 2)), batch_size=8)
    enlarge(data, 4)
    enlarge(np.zeros((64, 2)), 4)  # Keras's own batches are a rank's already
    assert data.batch_size == 32
