"""The pages that list commands and names list all of them."""

import argparse
import re
from pathlib import Path

import pytest

import tfscale
from tfscale.launcher import cli

DOCS = Path(__file__).resolve().parents[2] / "docs"


def parsers(parser, words=()):
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield words, parser
    for action in below:
        for name, child in action.choices.items():
            yield from parsers(child, (*words, name))


def commands():
    """Return the parser of each command by its words."""
    parser = argparse.ArgumentParser(prog="tfscale")
    below = parser.add_subparsers()
    for add in cli.COMMANDS.values():
        add(below)
    return dict(parsers(parser))


def section(words):
    text = (DOCS / "commands.md").read_text()
    parts = re.split(r"^## `tfscale ", text, flags=re.MULTILINE)[1:]
    (found,) = [part for part in parts if part.split("`")[0].startswith(" ".join(words))]
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_option_is_there(words):
    text = section(words)
    actions = [a for a in commands()[words]._actions if a.dest != "help" and a.option_strings]
    given = {name for action in actions for name in action.option_strings}
    missing = {n for n in given if not re.search(rf"(?<![\w-]){re.escape(n)}(?![\w-])", text)}
    assert not missing
    assert set(re.findall(r"`(--[a-z][a-z-]*)", text)) <= given


def test_every_name_is_there():
    text = (DOCS / "names.md").read_text()
    found = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    inside = (tfscale.callbacks, tfscale.data, tfscale.layers, tfscale.testing)
    assert sorted(found) == sorted([*tfscale.__all__, *(n for m in inside for n in m.__all__)])
    # Modules that need a package of their own have a section each.
    assert re.findall(r"^\| \[`(\w+)`\]\(#\1\) \|", text, re.MULTILINE) == [*tfscale._OPTIONAL]


def test_the_site_can_be_searched_without_a_server_and_the_internet():
    text = (DOCS.parent / "mkdocs.yml").read_text()
    assert re.search(r"^plugins:\n(  - .*\n)*  - offline\b", text, re.MULTILINE)
    # The plugin adds a script of another server unless one of this name is there.
    (script,) = re.findall(r"^  polyfills: \[(\S*iframe-worker\S*)\]", text, re.MULTILINE)
    assert (DOCS / "site" / script).is_file()
