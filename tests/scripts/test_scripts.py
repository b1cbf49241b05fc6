"""Users' scripts, which know nothing of tfscale: 2 or 3 ranks give what one process gives.

Each script here runs once by itself and once by `tfscale run --distribute`, with 2 or 3 ranks by
turns (RANKS=all: with both), in folders of their own and in float64, where sums in another order
differ by 1e-15 only. Compared are all files that it leaves, and all lines that it prints, so that
none comes twice. tfscale itself checks that all ranks have the same weights; its error would end
the script.
"""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.cases import HAS_ALL_SIZES
from tests.helpers.launching import job_words, run_in_folder
from tests.helpers.run_comparison import compare_files, compare_lines, read_files, read_lines

SCRIPTS = {
    path.stem: path
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem != "__init__" and not path.stem.startswith("test_")
}
QUICK = {"py_dataset", "recommender", "regression"}  # of `make test`
SEED = "1"
TIMEOUT_S = 280.0
FILES_TOLERANCE = 1e-8
LINES_TOLERANCE = 1e-5
# A script's own policy comes before floatx. float16 has 11 bits: 5e-4, which 28 steps amplify.
LOOSE = {"mixed_precision": 0.05}
ALONE = """
import keras, runpy, sys
keras.utils.set_random_seed(int(sys.argv[2]))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(scope="session")
def environ(tmp_path_factory):
    """Variables with which Keras computes in float64."""
    home = tmp_path_factory.mktemp("keras")
    (home / "keras.json").write_text(json.dumps({"floatx": "float64", "backend": "tensorflow"}))
    return {"KERAS_HOME": str(home)}


@pytest.fixture(scope="session")
def references(tmp_path_factory, environ):
    """A function from a script to the lines and files of one process, which runs once."""
    known = {}

    def reference(script):
        if script not in known:
            words = [sys.executable, "-c", ALONE, str(SCRIPTS[script]), SEED]
            known[script] = results_of(words, tmp_path_factory.mktemp(script), environ)
        return known[script]

    return reference


def results_of(words, folder, environ):
    """Run a command; return its lines and files, and all that it printed."""
    result = run_in_folder(words, folder, TIMEOUT_S, environ)
    printed = f"{result.output}\n{result.errors}"
    assert result.exit_code == 0, printed
    return read_lines(result.output), read_files(folder), printed


def cases():
    for turn, script in enumerate(SCRIPTS):
        own_size = 2 if script in QUICK else 2 + turn % 2
        for size in (2, 3) if HAS_ALL_SIZES else (own_size,):
            marks = [pytest.mark.quick] if size == 2 and script in QUICK else []
            yield pytest.param(script, size, marks=marks, id=f"{size}-{script}")


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(("script", "size"), cases())
def test_ranks_give_what_one_process_gives(script, size, references, environ, tmp_path):
    expected_lines, expected_files, _ = references(script)
    options = ["--distribute", "--seed", SEED, "-np", str(size)]
    words = job_words(options, [sys.executable, str(SCRIPTS[script])])
    lines, files, printed = results_of(words, tmp_path, environ)
    wrong = compare_lines(expected_lines, lines, LOOSE.get(script, LINES_TOLERANCE))
    wrong += compare_files(expected_files, files, LOOSE.get(script, FILES_TOLERANCE))
    if wrong:
        pytest.fail("\n".join([*wrong, printed]), pytrace=False)


def test_scripts_are_many_ordinary_and_not_chosen_to_be_easy():
    texts = {script: path.read_text() for script, path in SCRIPTS.items()}
    assert len(texts) >= 20 and texts.keys() >= QUICK | LOOSE.keys()
    imported = set()
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    assert imported <= {"keras", "numpy", "tensorflow", *sys.stdlib_module_names}
    for word, least in (
        ("BatchNormalization", 16),
        ("validation_split", 8),
        (r"Dropout|layers\.Random|keras\.random", 3),
    ):
        assert sum(bool(re.search(word, text)) for text in texts.values()) >= least, word
