"""Every public name has an example in its docstring, which prints what the docstring says."""

import ast
import doctest
import functools
import importlib
import inspect
import itertools
import re
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale.testing.inspect import forget_training

NAMES = Path(__file__).resolve().parents[2] / "docs" / "names.md"
# Examples begin as a program does that has imported these.
GIVEN = {"tfscale": tfscale, "keras": keras, "np": np, "tf": tf}


def public_names():
    """Return the names of docs/names.md with their sentences; a table's head has the module."""
    sentences, module = {}, ""
    for line in NAMES.read_text().splitlines():
        if head := re.match(r"\| `(tfscale\.(?:\w+\.)*)` \|", line):
            module = head[1]
        elif row := re.match(r"\| `(\w+)` \| (.*) \|", line):
            sentences[module + row[1]] = row[2]
    return sentences


def value_of(name):
    return functools.reduce(getattr, name.split(".")[1:], tfscale)


def docstring_of(name):
    """Return the docstring of a name; that of a constant is the text after its assignment."""
    value = value_of(name)
    if hasattr(value, "__name__"):
        return inspect.getdoc(value) or ""
    short = name.rpartition(".")[2]
    if short in tfscale._MODULE_OF:
        module = importlib.import_module(f"tfscale.{tfscale._MODULE_OF[short]}")
        for node, below in itertools.pairwise(ast.parse(inspect.getsource(module)).body):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == short:
                return inspect.cleandoc(ast.literal_eval(below.value))
    return inspect.getdoc(type(value)) or ""


@pytest.fixture
def beginning(tmp_path, monkeypatch):
    """Begin as a new program in an empty folder, without Horovod."""
    monkeypatch.chdir(tmp_path)
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    forget_training()
    with mock.patch("tfscale.comm.software.is_installed", lambda: False):
        yield


@pytest.mark.parametrize("name", public_names())
def test_the_page_of_names_has_the_first_line_of_a_docstring(name):
    first = docstring_of(name).partition("\n\n")[0]
    assert " ".join(first.split()) == public_names()[name]


@pytest.mark.parametrize("name", public_names())
def test_an_example_prints_what_its_docstring_says(name, beginning):
    examples = doctest.DocTestParser().get_doctest(docstring_of(name), dict(GIVEN), name, None, 0)
    short = name.rpartition(".")[2]
    assert any(re.search(rf"\b{short}\b", f"{e.source}{e.want}") for e in examples.examples), (
        f"The docstring of {name} must have an example that uses the name."
    )
    assert any(each.want for each in examples.examples), f"The example of {name} must print."
    report = []
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    doctest.DocTestRunner(optionflags=flags, verbose=False).run(examples, out=report.append)
    assert not report, "".join(report)
