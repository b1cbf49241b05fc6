"""`local_sgd_groups` on other data, to verify what `tfscale tune groups` advises."""

import runpy
from pathlib import Path

_same = runpy.run_path(str(Path(__file__).with_name("local_sgd_groups.py")))

TITLE = "Local SGD by the number of groups: a small VGG on 30000 pictures of MNIST"
SHOWS = """
The training of `local_sgd_groups` on MNIST, on which the rule of `tfscale tune groups` is verified.
"""
RECIPE = _same["RECIPE"]
FLAGS = _same["FLAGS"] | {"data": "mnist"}
CONFIGURATIONS = {
    name: _same["CONFIGURATIONS"][name] for name in ("1 group", "2 groups", "4 groups")
}
SERIES = {"local SGD": _same["SERIES"]["local SGD"]}
X_LABEL = "G: groups"
SEEDS = _same["SEEDS"]
METRIC = _same["METRIC"]
COLUMNS = _same["COLUMNS"]
MAY_LOSE = _same["MAY_LOSE"]
