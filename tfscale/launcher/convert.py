"""The command `tfscale convert`: a Keras script changed for several ranks, as a diff."""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfscale.config import ConfigError

_RANK_ZERO = "tfscale.rank() == 0"
# By these a call is known as one of Keras: other libraries have `fit` and `compile`, too.
_OF_FIT = {"batch_size", "epochs", "callbacks", "validation_data", "validation_split"}
_OF_COMPILE = {"loss", "metrics", "weighted_metrics", "run_eagerly", "steps_per_execution"}
_MOVED_TO_DATA = {"y", "batch_size", "shuffle", "sample_weight", "validation_split"}
_WRITING_CALLBACKS = {"CSVLogger", "TensorBoard", "RemoteMonitor"}
# Functions and methods that print or write, where they are a statement of their own.
_WRITING = {
    *("print", "summary", "save", "save_weights", "export", "savefig", "show", "plot_model"),
    *("to_csv", "to_json", "to_pickle", "savez", "savetxt", "dump", "save_model", "imsave"),
}
# What all ranks must call, wherever it stands.
_OF_ALL = {"fit", "train_on_batch"}
_BY_HAND = {
    "train_on_batch": "give each rank its rows of the batch ('Data' in the documentation)",
    "GradientTape": "use tfscale.DistributedGradientTape and tfscale.broadcast_variables",
    "BackupAndRestore": "use tfscale.callbacks.BackupAndRestore",
    "BatchNormalization": "uses the samples of one rank; for those of all ranks use "
    "tfscale.SyncBatchNormalization",
}


class _Edits:
    """Changes of a text, at the positions of its syntax tree."""

    def __init__(self, text: str) -> None:
        self._text, self._lines = text, text.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._edits: list[tuple[int, int, str]] = []

    def _place(self, line: int, n_bytes: int) -> int:
        # Syntax trees count lines from 1, and columns in bytes of UTF-8.
        before = self._lines[line - 1].encode()[:n_bytes]
        return self._starts[line - 1] + len(before.decode())

    def span(self, node: Any) -> tuple[int, int]:
        """Return the places where a node begins and ends."""
        begin = self._place(node.lineno, node.col_offset)
        return begin, self._place(node.end_lineno, node.end_col_offset)

    def source(self, node: ast.AST) -> str:
        """Return the text of a node."""
        begin, end = self.span(node)
        return self._text[begin:end]

    def indent(self, statement: Any) -> str | None:
        """Return the space before a statement; None if it shares its lines with others."""
        begin, end = self.span(statement)
        before = self._text[self._starts[statement.lineno - 1] : begin]
        after = self._text[end : self._starts[statement.end_lineno]]
        return None if before.strip() or after.partition("#")[0].strip() else before

    def change(self, begin: int, end: int, text: str) -> None:
        """Replace what is between two places."""
        self._edits.append((begin, end, text))

    def wrap(self, node: ast.AST, before: str, after: str) -> None:
        """Put texts around a node."""
        begin, end = self.span(node)
        self.change(begin, begin, before)
        self.change(end, end, after)

    def result(self) -> str:
        """Return the changed text."""
        at, parts = 0, []
        for begin, end, text in sorted(self._edits, key=lambda edit: edit[:2]):
            parts += [self._text[at:begin], text]
            at = max(at, end)
        return "".join([*parts, self._text[at:]])


class _Script:
    """A script of Keras while it is converted; `notes` are what is left to its author, by line."""

    def __init__(self, text: str, name: str) -> None:
        try:
            self._tree = ast.parse(text)
        except SyntaxError as error:
            raise ConfigError(f"script must be Python. Received: {name}: {error}.") from error
        self._edits, self._name = _Edits(text), name
        self._trained: set[str] = set()  # models, as they are named where they are compiled
        self._needs_keras_name = False
        self.notes: list[tuple[int, str]] = []

    def convert(self) -> str:
        """Return the text for several ranks."""
        calls = list(_calls(self._tree))
        for call in calls:
            if _last_name(call.func) == "compile" and _is_compile(call):
                self._compile(call)
        for call in calls:
            name = _last_name(call.func)
            if name == "fit" and self._is_fit(call):
                self._fit(call)
            elif name in _WRITING_CALLBACKS:
                self._edits.wrap(call, "tfscale.callbacks.RankZero(", ")")
            elif name == "open" and any(mode in ast.unparse(call) for mode in ("'w", "'a", "'x")):
                self._note(call, f"every rank writes this file; put it below `if {_RANK_ZERO}:`")
            elif name in _BY_HAND:
                self._note(call, f"{name}: {_BY_HAND[name]}")
        self._guard(self._tree)
        self._import()
        self.notes.sort()
        return self._edits.result()

    def _note(self, node: Any, text: str) -> None:
        self.notes.append((node.lineno, text))

    # Models.

    def _compile(self, call: ast.Call) -> None:
        self._trained.add(ast.unparse(call.func.value))  # type: ignore[attr-defined]
        optimizers = [k.value for k in call.keywords if (k.arg or "").endswith("optimizer")]
        optimizers += call.args[:1]
        for value in optimizers:
            begin, end = "tfscale.DistributedOptimizer(", ")"
            if not isinstance(value, ast.Call):  # maybe a name, such as "adam"
                begin, end = f"{begin}{self._keras()}.optimizers.get(", "))"
            self._edits.wrap(value, begin, end)
        if not optimizers:
            default = f'tfscale.DistributedOptimizer({self._keras()}.optimizers.get("rmsprop"))'
            self._add(call, f"optimizer={default}")

    def _keras(self) -> str:
        """Return the name of Keras in this script."""
        module_names = dict(_imports(self._tree))
        for module, end in (("keras", ""), ("tensorflow.keras", ""), ("tensorflow", ".keras")):
            if module in module_names:
                return module_names[module] + end
        self._needs_keras_name = True
        return "keras"

    def _is_fit(self, call: ast.Call) -> bool:
        names = {keyword.arg for keyword in call.keywords}
        is_known = isinstance(call.func, ast.Attribute) and (
            ast.unparse(call.func.value) in self._trained
        )
        return is_known or bool(names & _OF_FIT)

    def _fit(self, call: ast.Call) -> None:
        arguments: dict[str, ast.expr] = dict(zip("xy", call.args, strict=False))
        arguments |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
        if (
            len(call.args) > 2
            or "**" in arguments
            or any(isinstance(a, ast.Starred) for a in call.args)
        ):
            self._note(call, "fit: name its arguments after y, then convert again")
            return
        if "x" in arguments and "y" in arguments:
            self._slice(call, arguments)
        else:
            text = (
                "fit: each rank trains on all of this data; give it GlobalBatches ('Data' in the "
                "documentation)"
            )
            self._note(call, text)
        synchronize = "tfscale.callbacks.Synchronize()"
        callbacks, verbose = arguments.get("callbacks"), arguments.get("verbose")
        if isinstance(callbacks, ast.List):
            begin = self._edits.span(callbacks)[0] + 1
            self._edits.change(begin, begin, f"{synchronize}{', ' if callbacks.elts else ''}")
        elif callbacks is not None:
            self._edits.wrap(callbacks, f"[{synchronize}, *(", " or [])]")
        else:
            self._add(call, f"callbacks=[{synchronize}]")
        if verbose is None:
            self._add(call, f'verbose="auto" if {_RANK_ZERO} else 0')
        elif ast.unparse(verbose) != "0":
            self._edits.wrap(verbose, "", f" if {_RANK_ZERO} else 0")

    def _slice(self, call: ast.Call, arguments: dict[str, ast.expr]) -> None:
        """Put the arrays of a `fit` into GlobalBatches, validation data included."""
        text = {name: self._edits.source(value) for name, value in arguments.items()}
        for name in ("x", "y", "sample_weight"):
            if isinstance(arguments.get(name), ast.BinOp):  # [...] binds closer
                text[name] = f"({text[name]})"
        size, part = text.get("batch_size", "32"), ""
        rest = f"batch_size={size}, shuffle=False)"
        valid = arguments.get("validation_data")
        if "validation_split" in text:
            statement = self._statement_of(call)
            if statement is None or isinstance(arguments["x"], ast.List | ast.Tuple | ast.Dict):
                self._note(
                    call,
                    "fit: cut the arrays instead of validation_split ('Data' in the documentation)",
                )
                return
            part, at = "[:n_trained]", self._edits.span(statement)[0]
            count = f"n_trained = int(len({text['x']}) * (1 - {text['validation_split']}))"
            self._edits.change(at, at, f"{count}\n{self._edits.indent(statement)}")
            x, y = f"{text['x']}[n_trained:]", f"{text['y']}[n_trained:]"
            self._add(call, f"validation_data=tfscale.data.GlobalBatches({x}, {y}, {rest}")
        elif isinstance(valid, ast.Tuple) and len(valid.elts) == 2:
            x, y = map(self._edits.source, valid.elts)
            data = f"tfscale.data.GlobalBatches({x}, {y}, {rest}"
            self._edits.change(*self._edits.span(valid), data)
        data = f"{text['x']}{part}, {text['y']}{part}, batch_size={size}"
        data += f", shuffle={text['shuffle']}" if "shuffle" in text else ""
        if "sample_weight" in text:
            data += f", sample_weight={text['sample_weight']}{part}"
        self._edits.change(*self._edits.span(arguments["x"]), f"tfscale.data.GlobalBatches({data})")
        self._remove(call)

    def _add(self, call: ast.Call, text: str) -> None:
        """Add an argument at the end."""
        ends = [self._edits.span(argument)[1] for argument in [*call.args, *call.keywords]]
        at = max(ends, default=self._edits.span(call)[1] - 1)
        self._edits.change(at, at, f", {text}" if ends else text)

    def _remove(self, call: ast.Call) -> None:
        """Remove the arguments of a `fit` that GlobalBatches take, with a comma each."""
        arguments = [*call.args, *call.keywords]
        taken = [n in call.args[1:] or getattr(n, "arg", "") in _MOVED_TO_DATA for n in arguments]
        first = taken.index(False)  # x at the latest
        if first:
            begin = self._edits.span(arguments[0])[0]
            self._edits.change(begin, self._edits.span(arguments[first])[0], "")
        for i in range(first + 1, len(arguments)):
            if taken[i]:
                begin = self._edits.span(arguments[i - 1])[1]
                self._edits.change(begin, self._edits.span(arguments[i])[1], "")

    # Statements.

    def _statement_of(self, call: ast.Call) -> ast.stmt | None:
        """Return the assignment or expression of a call, if it has lines of its own."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign | ast.Expr) and node.value is call:
                return None if self._edits.indent(node) is None else node
        return None

    def _guard(self, parent: ast.AST) -> None:
        """Let rank 0 alone run statements that print or write; those of classes stay."""
        for body in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
            is_guarded = False
            for statement in body if isinstance(body, list) else ():
                was_guarded, is_guarded = is_guarded, False
                if isinstance(statement, ast.Expr) and _is_writing(statement.value):
                    is_guarded = self._guard_statement(statement, was_guarded)
                elif not isinstance(statement, ast.ClassDef):
                    self._guard(statement)
        for handler in getattr(parent, "handlers", ()):
            self._guard(handler)

    def _guard_statement(self, statement: ast.Expr, was_guarded: bool) -> bool:
        indent, at = self._edits.indent(statement), self._edits.span(statement)[0]
        collective = next((c for c in _calls(statement) if _last_name(c.func) in _OF_ALL), None)
        if collective is not None:
            name = _last_name(collective.func)
            self._note(statement, f"every rank does this; put {name} in a line of its own")
            return False
        if indent is None:
            self._note(statement, f"every rank does this; put it below `if {_RANK_ZERO}:`")
            return False
        text = "" if was_guarded else f"if {_RANK_ZERO}:\n{indent}"
        self._edits.change(at, at, f"{text}    ")
        return True

    def _import(self) -> None:
        """Import tfscale and call init after the imports, of which one is that of Keras."""
        last = None
        for statement in self._tree.body:
            is_import = isinstance(statement, ast.Import | ast.ImportFrom)
            if is_import and (last or any(map(_is_framework, _imports(statement)))):
                last = statement
            elif last:
                break
        names = {name.partition(".")[0] for name, _ in _imports(self._tree)}
        if last is None or not self._trained or names & {"tfscale", "horovod"}:
            raise ConfigError(
                "tfscale convert takes a script for one process that imports Keras or TensorFlow "
                f"at its top and calls compile and fit. Received: {self._name}, which does not, or "
                "imports tfscale or Horovod. See 'First training' and 'From Horovod' in the "
                "documentation."
            )
        end = self._edits.span(last)[1]
        keras = "\nimport keras" if self._needs_keras_name else ""
        self._edits.change(end, end, f"{keras}\nimport tfscale\n\ntfscale.init()")


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what is imported: the dotted name, and its name in the script."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, a.asname or a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{a.name}", a.asname or a.name) for a in node.names)


def _is_framework(imported: tuple[str, str]) -> bool:
    return imported[0].partition(".")[0] in ("keras", "tensorflow")


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls outside of classes: methods such as `train_step` stay as they are."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        yield from _calls(node)


def _last_name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_compile(call: ast.Call) -> bool:
    names = {keyword.arg or "" for keyword in call.keywords}
    has_optimizer = any(name.endswith("optimizer") for name in names)
    return isinstance(call.func, ast.Attribute) and bool(has_optimizer or names & _OF_COMPILE)


def _is_writing(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _last_name(value.func) in _WRITING


def convert(text: str, name: str) -> tuple[str, Sequence[tuple[int, str]]]:
    """Return a script as it is written by hand for several ranks, and notes by line.

    Raises:
        ConfigError: The text is no script of Keras for one process.
    """
    script = _Script(text, name)
    return script.convert(), script.notes


def add_convert(commands: argparse._SubParsersAction) -> None:
    """Add the parser of `tfscale convert`."""
    what = "print what to change in a Keras script that is made for several ranks by hand"
    parser = commands.add_parser("convert", help=what)
    parser.add_argument("script", metavar="train.py", help="script for one process")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--in-place", action="store_true", help="change the script instead")
    where.add_argument("--output", metavar="FILE", help="write the changed script instead")
    parser.set_defaults(handler=_convert)


def _convert(options: argparse.Namespace) -> int:
    path = Path(options.script)
    try:
        before = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Could not read the script. Received: {error}.") from error
    after, notes = convert(before, options.script)
    target = path if options.in_place else Path(options.output) if options.output else None
    if target is not None:
        target.write_text(after, "utf-8")
    else:
        lines = (before.splitlines(keepends=True), after.splitlines(keepends=True))
        diff = difflib.unified_diff(*lines, options.script, f"{options.script} (distributed)")
        sys.stdout.writelines(diff)
    for line, text in notes:
        sys.stderr.write(f"# tfscale: {options.script}:{line}: {text}\n")
    return 0
