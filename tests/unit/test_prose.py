"""Words that documentation of the field does not use in these senses; see docs/glossary.md."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "docs/**/*.md"),
    "tfscale/**/*.py",
    *("custom_ops/**/*.cc", "custom_ops/**/*.h", "recipes/**/*.py", "recipes/**/*.md"),
    *("tools/**/*.py", "benchmarks/**/*.py", "tests/**/*.py"),
)
# The word to write in its place.
WORDS = {
    r"behind": "after, or: overlaps with",
    r"travel\w*": "send, move",
    r"anew": "again, re-trace",
    r"(go|goes|going|went|gone) on(?! (to|one|rank|with all))": "resume, continue",
    r"nobody": "no rank, no process",
    r"amid": "in, during",
    r"whoever": "the caller, the reader",
}
# Verbs that need a story, in the library.
STORIES = {
    r"settl\w*": "the action: publish, refresh, level off",
    r"judg\w*": "decide, report, compare",
    r"told_of": "the thing: notices, reports",
    r"unites": "averages, joins",
}
# Places where the word has its usual sense, or is quoted.
EXCEPTIONS = {"tests/unit/test_prose.py": r".*"}
FIRST_WORD = re.compile(r"(What|Which|Where|How|Who|When)\b")


def files():
    return sorted(
        {path for pattern in PLACES for path in ROOT.glob(pattern) if "site" not in path.parts}
    )


@pytest.mark.parametrize(
    ("words", "folder"), [(WORDS, ""), (STORIES, "tfscale/")], ids=["words", "stories"]
)
def test_words_of_the_field(words, folder):
    found = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not name.startswith(folder):
                break
            if name in EXCEPTIONS and re.search(EXCEPTIONS[name], line):
                continue
            found += [
                f"{name}:{number}: {match[0]!r}, write: {instead}"
                for word, instead in words.items()
                for match in re.finditer(rf"\b_?{word}\b", line, re.IGNORECASE)
            ]
    assert not found, "\n".join(found)


def identifiers(text):
    """Yield line and name of each function, class, argument, local and attribute of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(getattr(node, "ctx", None), ast.Store) and not hasattr(node, "elts"):
            yield node.lineno, getattr(node, "id", getattr(node, "attr", ""))


def unusual_words(identifier):
    """Return the words of an identifier that the lists have, each with the one to use instead."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", identifier)
    return [
        f"{match[0]!r}, write: {instead}"
        for word, instead in (WORDS | STORIES).items()
        for match in re.finditer(rf"\b{word.replace('_', ' ')}\b", words, re.IGNORECASE)
    ]


def test_identifiers_have_words_of_the_field():
    paths = sorted((ROOT / "tfscale").rglob("*.py"))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} has {fault}"
        for path in paths
        for line, name in identifiers(path.read_text(encoding="utf-8"))
        for fault in unusual_words(name)
    ]
    assert not found, "\n".join(found)


def test_unusual_words_are_found_in_identifiers():
    source = (
        "class RunsBehind:\n    def _settle(self, n_travels):\n        self.told_of = goes_on = 1"
    )
    names = [name for _, name in identifiers(source) if name != "self"]
    assert set(names) == {"RunsBehind", "_settle", "n_travels", "told_of", "goes_on"}
    assert all(len(unusual_words(name)) == 1 for name in names)
    assert not unusual_words("goes_on_rank")


# Pages that users read from top to bottom; tables and code are no sentences.
READ = ("Start", "Guides")
MOST_WORDS = 35


def pages_of(section):
    """Return the files of a section of the site's navigation."""
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\nnot_in_nav:")[0]
    (part,) = re.findall(rf"^  - {section}:.*\n((?:      - .*\n?)+)", nav, re.MULTILINE)
    names = re.findall(r": (\S+\.md)$", part, re.MULTILINE)
    return [ROOT / (name if "/" in name else f"docs/site/{name}") for name in names]


def sentences(text):
    """Yield the sentences of a page in Markdown, with a word for each piece of code."""
    text = re.sub(r"^( *)```.*?^\1```$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(\||#|!\[|<|    ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "CODE", re.sub(r"\]\([^)]*\)", "]", text))
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[*-]|\d+\.) ", text):
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z\[*(])", " ".join(paragraph.split()))


@pytest.mark.parametrize("section", READ)
def test_sentences_of_guides_are_short(section):
    found = [
        f"{page.name}: {len(sentence.split())} words: {sentence}"
        for page in [ROOT / "README.md", *pages_of(section)]
        for sentence in sentences(page.read_text(encoding="utf-8"))
        if len(sentence.split()) > MOST_WORDS
    ]
    assert not found, "\n".join(found)


def texts_of(module):
    """Yield the texts of a module, but for its docstrings."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in documentation:
            yield node.value


def test_messages_name_pages_by_their_titles():
    """An installed wheel has no folder `docs`: errors name titles of the site."""
    nav = (ROOT / "mkdocs.yml").read_text()
    titles = set(re.findall(r"^      - (.+?): \S+\.md$", nav, re.MULTILINE))
    named = r"'([A-Z][^']+)'(?: and '([^']+)')?(?:, section '[^']+',)? in the documentation"
    faults, n_named = [], 0
    for path in sorted((ROOT / "tfscale").rglob("*.py")):
        for text in texts_of(path):
            pages = [title for found in re.findall(named, text) for title in found if title]
            n_named += len(pages)
            if re.search(r"docs/[\w-]+\.md", text) or not set(pages) <= titles:
                faults.append(f"{path.relative_to(ROOT)}: {text}")
    assert not faults and n_named > 15, "\n".join(faults)


@pytest.mark.parametrize("section", [*READ, "Reference", "Background"])
def test_links_have_titles(section):
    """A reader learns from the text of a link where it leads; a file's name does not tell."""
    found = [
        f"{page.name}: {text}"
        for page in [ROOT / "README.md", *pages_of(section)]
        for text in re.findall(r"\[([^\]]+\.md)\]\(", page.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_lists_hold_no_tables_or_code():
    """On the site a list ends at a block that is indented by less than four spaces."""
    sections = (*READ, "Reference", "Background", "Results", "Project")
    pages = [page for section in sections for page in pages_of(section) if page.exists()]
    found = [
        f"{page.name}:{number}: {line}"
        for page in [ROOT / "README.md", *pages]
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if re.match(r" {1,3}(```|\|)", line)
    ]
    assert not found, "\n".join(found)


def test_the_readme_fits_on_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("folder", ["tfscale", "recipes", "tools", "benchmarks"])
def test_docstrings_begin_with_a_thing_or_an_imperative(folder):
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and FIRST_WORD.match(text):
                    found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


# They say that something was found or given, not what it is.
VAGUE = {"own", "every", "found", "given", "place", "known", "words"}
VAGUE_LINES = 2  # of a function in which such a name may be used: its source is in view
# Arguments of `tfscale.testing`, which users write beside `expected`.
VAGUE_EXCEPTIONS = {
    ("testing/ranks.py", "require_identical"),
    ("testing/ranks.py", "require_close"),
}


def vague_lines(function):
    """Return the lines of a function in which each vague local or argument is used."""
    lines = {}
    assigned = set()
    for node in ast.walk(function):
        name = getattr(node, "id", getattr(node, "arg", None))
        if isinstance(node, (ast.Name, ast.arg)) and name in VAGUE:
            lines.setdefault(name, []).append(node.lineno)
            if isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store):
                assigned.add(name)
    return {name: lines[name] for name in assigned}


def test_locals_say_what_they_hold():
    found = [
        f"{name}: {local} in {node.name}, lines {lines[0]} to {max(lines)}"
        for path in sorted((ROOT / "tfscale").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for name in [path.relative_to(ROOT / "tfscale").as_posix()]
        if (name, node.name) not in VAGUE_EXCEPTIONS
        for local, lines in vague_lines(node).items()
        if max(lines) - min(lines) >= VAGUE_LINES
    ]
    assert not found, "\n".join(found)


# Names of Keras and TensorFlow that comments refer to and no code of ours uses.
FOREIGN = {
    *("add_loss", "get_vocabulary", "load_weights", "set_weights"),
    *("on_batch_begin", "on_batch_end", "_enumerate_iterator", "_output_signature"),
    *("class_weight_to_sample_weights", "get_global_attribute", "_list_all_concrete_functions"),
    *("data_adapter_utils", "polymorphic_function", "tensor_callable", "LossFunctionWrapper"),
    *("EpochIterator", "PyDatasetAdapter", "global_state", "global_seed_generator"),
}
QUOTED = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")
SUFFIXES = {"py", "json", "jsonl", "md", "so", "cc", "h"}


def is_name(text):
    """Return whether a quotation looks like a name of code: with `_`, dots or inner capitals."""
    return "_" in text.strip("_") or "." in text or bool(re.match(r"[A-Z]\w*[a-z]\w*[A-Z]", text))


def words_of_code():
    """Return the names that code uses, in Python without comments and docstrings."""
    words = set()
    for pattern in ("tfscale/**/*.py", "tools/**/*.py", "recipes/**/*.py", "benchmarks/**/*.py"):
        for path in ROOT.glob(pattern):
            words.update(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                for field in ("id", "attr", "arg", "name"):
                    text = getattr(node, field, None)
                    words.update(text.split(".") if isinstance(text, str) else ())
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    is_text = re.fullmatch(r"[\w.:-]+", node.value)
                    words.update(re.findall(r"\w+", node.value) if is_text else ())
                if isinstance(node, ast.ImportFrom) and node.module:
                    words.update(node.module.split("."))
    for path in ROOT.glob("custom_ops/**/*.[ch]*"):
        words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return words


def comments_of(text):
    """Yield line and text of the comments and docstrings of a module."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def test_names_in_comments_exist():
    words = words_of_code() | FOREIGN | SUFFIXES
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tfscale").rglob("*.py"))
        for line, text in comments_of(path.read_text(encoding="utf-8"))
        for name in QUOTED.findall(text)
        if is_name(name) and not name.startswith(("tf.", "keras."))
        if not words.issuperset(name.split("."))
    ]
    assert not found, "\n".join(found)
