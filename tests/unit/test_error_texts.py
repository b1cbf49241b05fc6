"""The sentences of the library's errors, each once: other tests match a type and a name.

Reads sources only. `WRITE_GOLDEN=1` writes tests/golden_errors.txt again from the sources.
"""

import ast
import difflib
import os
import re
from collections.abc import Iterator

from tests.helpers.sources import CPP, LIBRARY, ROOT, parse, relative

GOLDEN = ROOT / "tests" / "golden_errors.txt"
Names = dict[str, ast.expr | None]  # what a name stands for at a place; None: more than one thing


def template(node: ast.expr, names: Names) -> str:
    """Return a text with the holes of its f-strings; an expression that is no text is a hole."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, names) + template(node.right, names)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, names) for part in node.values)
    value = node.value if isinstance(node, ast.FormattedValue) else node
    stands_for = names.get(value.id) if isinstance(value, ast.Name) else None
    if isinstance(stands_for, ast.Constant | ast.JoinedStr | ast.BinOp):
        return template(stands_for, {**names, value.id: None})
    form = "!r" if getattr(node, "conversion", -1) == ord("r") else ""
    if form_spec := getattr(node, "format_spec", None):
        form += ":" + template(form_spec, names)
    source = ast.unparse(value).replace('"', "'")  # Python's versions choose different quotes
    return "{" + source + form + "}"


def text_of(call: ast.Call, names: Names) -> str | None:
    """Return "Type: text" if a call makes an error, by its class or by `config.require`."""
    kind = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if not call.args or not re.search(r"Error$|^require$|^check_integer$", kind):
        return None
    name, *texts = (template(a, names) for a in call.args[kind == "require" :])
    if kind.endswith("Error"):
        return f"{kind}: {texts[-1] if texts else name}"
    what = texts[0] if kind == "require" else f"a whole number of at least {texts[1]}"
    remedy = "".join(texts[2:])
    return f"ConfigError: {name} must be {what}. Received: {name}={{value!r}}. {remedy}"


def assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    for node in ast.walk(statement):
        for target in getattr(node, "targets", []) if isinstance(node, ast.Assign) else []:
            is_pair = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=True) if is_pair else ()
            pairs = [*pairs, (target, node.value)]
            yield from ((t.id, value) for t, value in pairs if isinstance(t, ast.Name))


def errors(statements: list[ast.stmt], names: Names) -> Iterator[str]:
    """Yield "Type: text" of each error that is made, and texts for errors that others make."""
    names = dict(names)
    for statement in statements:
        nested = [getattr(statement, block, []) for block in ("body", "orelse", "finalbody")]
        nested = [*filter(None, nested), *(h.body for h in getattr(statement, "handlers", []))]
        seen = {id(each) for block in nested for s in block for each in ast.walk(s)}
        for node in ast.walk(statement):
            text = None
            if id(node) in seen or is_documentation(statement):
                continue
            if isinstance(node, ast.Call):
                text = text_of(node, names)
            elif isinstance(node, ast.JoinedStr | ast.Constant):
                text = "text: " + template(node, names)
                text = text if "Received: " in text else None
            if text:
                yield text.strip()
                seen |= {id(each) for each in ast.walk(node)}
        for block in nested:
            yield from errors(block, names)
        for name, value in assigned(statement):
            names[name] = None if nested else value


def is_documentation(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def texts_by_module() -> dict[str, list[str]]:
    texts = {relative(path): sorted(set(errors(parse(path).body, {}))) for path in LIBRARY}
    return {module: lines for module, lines in texts.items() if lines}


def test_texts_of_errors():
    lines = []
    for module, texts in texts_by_module().items():
        lines += [f"# {module}", *(text.replace("\n", "\\n") for text in texts), ""]
    if os.environ.get("WRITE_GOLDEN"):
        GOLDEN.write_text("\n".join(lines))
    diff = difflib.unified_diff(GOLDEN.read_text().split("\n"), lines, "golden", "found", n=0)
    changed = "\n".join(diff)
    assert not changed, f"{changed}\nRead them once more, then run this test with WRITE_GOLDEN=1."


# Python's own errors, and those of damaged files, are parts of other sentences.
OWN = re.compile(r"\w*(?:Config|Plan|Exchange|Build)Error: (.*)", re.DOTALL)
# A requirement, what was received, and what to do; or a text that another function makes.
FORM = re.compile(r".+\. Received: .*(\.|\{.*\}|Example: [^{]*.*)|\{.*\}", re.DOTALL)


# An argument, an option, a value, a rank: what a program writes begins in lower case or with a
# sign, or has capitals, digits or brackets inside, as `XLA`, `LocalSGD` and `RankZero(...)`.
CODE = re.compile(r"[^A-Z\s]\S*|\S+[^a-z\s,:]\S*")
# Products whose names look like words; and faults, as in "Could not write ...".
NAMES = {"Horovod", "Keras", "TensorFlow"}
FAULTS = {"Could", "No", "Two"}
MAXIMS = {"a", "all", "an", "each", "every", "it", "only", "the", "there"}


def begins_well(text: str) -> bool:
    """Return whether a text begins with an argument, a value or a fault, and not with a maxim."""
    first = text.split()[0].rstrip(",:")
    return first in NAMES | FAULTS or (bool(CODE.fullmatch(first)) and first not in MAXIMS)


def own_texts() -> list[str]:
    texts = {text for texts in texts_by_module().values() for text in texts}
    return [match[1] for match in map(OWN.fullmatch, sorted(texts)) if match]


def test_errors_name_the_requirement_and_what_was_received():
    assert [text for text in own_texts() if not FORM.fullmatch(text)] == []


def test_errors_begin_with_the_argument_the_value_or_the_fault():
    every_text = {text for texts in texts_by_module().values() for text in texts}
    begins = (text.partition(": ")[2] for text in sorted(every_text) if "Received: " in text)
    assert [text for text in begins if not begins_well(text)] == []


STATEMENT = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.)*")+;')
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


def cpp_texts(source: str) -> Iterator[str]:
    """Yield the errors of a C++ source, with a hole for each expression between its strings."""
    source = re.sub(r"^ *//.*$", "", source, flags=re.MULTILINE)
    for statement in STATEMENT.findall(source):
        pieces = STRING.split(statement)  # code, string, code, string, ...
        if "Received: " not in "".join(pieces[1::2]):
            continue
        text = "{}" if pieces[0].rstrip().endswith("+") else ""
        for string, code in zip(pieces[1::2], pieces[2::2], strict=True):
            text += string + ("{}" if code.strip() else "")
        yield text


def test_errors_of_the_engine_begin_with_the_value_or_the_fault():
    paths = [path for path in CPP if path.parent.name != "test"]
    texts = [text for path in paths for text in cpp_texts(path.read_text())]
    assert len(texts) > 20
    assert [text for text in texts if not begins_well(text)] == []


def test_maxims_are_found():
    for text in (
        "A rank must have data. Received: none.",
        "It is not possible to add a set twice. Received: two.",
        "every rank needs one sample. Received: 0.",
        "Collectives are timed by the engine. Received: Horovod.",
    ):
        assert not begins_well(text)
    for text in (
        "batch_size must be 1 or more. Received: 0.",
        "{name} must be 1 or 0. Received: 2.",
        "--env must be K=V. Received: K.",
        "LocalSGD needs all ranks. Received: 2.",
        "rank 1 gave 3 tensors, rank 0 gave 4. Received: allgather.",
        "Could not load the library. Received: an error.",
    ):
        assert begins_well(text)
