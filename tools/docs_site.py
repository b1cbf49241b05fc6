"""Hooks of mkdocs.yml: pages from the repository's Markdown files and from its public names.

The pages of the API reference follow the tables in `tfscale/__init__.py`, and `__all__` of the
modules that users import by name. Sources are parsed and never imported: TensorFlow is not needed.
The words of each section of the navigation are printed; too many are a warning, and so an error.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.docs_site")

ROOT = Path(__file__).resolve().parents[1]
# Not README.md: docs/site/index.md is the site's entrance.
PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/results/*.md",
    "docs/*.png",
    "docs/results/*.png",
    "docs/*.svg",
    "docs/*.json",
    "docs/containers/*",
    "recipes/README.md",
    "recipes/results/**/*.md",
    "recipes/results/**/*.png",
    "recipes/results/**/*.json",
)
NAMES = "docs/names.md"
# Sections that users read, README.md included. Reference and results are looked up.
READ = ("Start", "Guides", "Background")
MOST_WORDS = 25_000
TITLES = {
    "callbacks": "Callbacks",
    "checkpoints": "Checkpoints",
    "comm": "Ranks and collectives",
    "config": "Errors and exit codes",
    "data": "Data",
    "exchange": "Exchanges",
    "fit": "Training with fit",
    "launcher": "Notebooks and programs",
    "local_sgd": "Local SGD",
    "measure": "Training loops with auto",
    "keras": "Horovod's names",
    "optimizer": "Optimizers and tapes",
    "testing": "Tests of training code",
    "transparent": "Unchanged scripts",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Begin the section Reference with the public names and the API; print words per section."""
    words = count_words(config.nav or ())
    n_read = sum(words.get(section, 0) for section in READ)
    log.info("Words: %s", ", ".join(f"{section} {count}" for section, count in words.items()))
    log.info("Words of %s together: %d of %d", ", ".join(READ), n_read, MOST_WORDS)
    if n_read > MOST_WORDS:
        log.warning("These pages must have at most %d words. Received: %d.", MOST_WORDS, n_read)
    api = [{TITLES.get(room, room): f"api/{room}.md"} for room in rooms()]
    (section,) = [part["Reference"] for part in config.nav or () if "Reference" in part]
    section.insert(0, {"Public names": [NAMES, *api]})
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Link each name on the page of public names to its description."""
    return link_names(markdown) if page.file.src_uri == NAMES else markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages under their own paths, and the generated ones."""
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for room, names in rooms().items():
        files.append(File.generated(config, f"api/{room}.md", content=page(room, names)))
    return files


def rooms() -> dict[str, dict[str, str]]:
    """Return, for each part of the library, its public names and where they are defined.

    `tfscale.rank` is defined in `tfscale.comm.runtime`, and belongs to `comm`.
    """
    tables = constants("tfscale")
    names = {n: f"tfscale.{m}" for m, listed in tables["_NAMES_BY_MODULE"].items() for n in listed}
    found = {f"tfscale.{name}": f"{module}.{name}" for name, module in names.items()}
    for alias, place in tables["_SUBMODULES"].items():
        for name in exported(place):
            if name not in names and name not in tables["_SUBMODULES"]:
                found[f"tfscale.{alias}.{name}"] = f"tfscale.{place}.{name}"
    parts: dict[str, dict[str, str]] = {}
    for name in sorted(found, key=str.lower):
        require(found[name])
        parts.setdefault(found[name].split(".")[1], {})[name] = found[name]
    return dict(sorted(parts.items(), key=lambda part: TITLES.get(part[0], part[0])))


def page(room: str, names: dict[str, str]) -> str:
    """Return the page of one part of the library, for mkdocstrings to fill in."""
    lines = [f"# {TITLES.get(room, room)}", "", summary(f"tfscale.{room}"), ""]
    for name, target in names.items():
        # The anchor is the name that users write; mkdocstrings adds that of the definition.
        lines += [f"[](){{#{name}}}", "", f"::: {target}", f"    options: {{heading: {name}}}", ""]
    if room == "keras":
        tables = constants("tfscale")
        known = [name for listed in tables["_NAMES_BY_MODULE"].values() for name in listed]
        shared = [f"tfscale.{name}" for name in exported(room) if name in known]
        lines += ["## The same as in tfscale", "", *(f"- {link(name)}" for name in shared), ""]
    return "\n".join(lines)


def link_names(text: str) -> str:
    """Return the page of public names with links; the head of a table names its module."""
    known = {name for names in rooms().values() for name in names}
    prefix, lines = "", []
    for line in text.splitlines():
        head = re.match(r"\| `(tfscale\.[\w.]*)` \|", line)
        prefix = head[1] if head else prefix
        row = re.match(r"\| `(\w+)` (\|.*)", line)
        is_known = row is not None and prefix + row[1] in known
        lines.append(f"| [`{row[1]}`][{prefix}{row[1]}] {row[2]}" if row and is_known else line)
    return "\n".join(lines)


def count_words(nav: Iterable[Any]) -> dict[str, int]:
    """Return the number of words of the pages of each section; README.md counts as Start."""
    words = {}
    for part in nav:
        for section, entries in part.items():
            pages = [page for entry in entries for page in entry.values()]
            paths = [find_page(page) for page in pages]
            if section == READ[0]:
                paths.append(ROOT / "README.md")
            words[section] = sum(len(path.read_text().split()) for path in paths if path.exists())
    return words


def find_page(page: str) -> Path:
    """Return the file of a page of the navigation."""
    path = ROOT / page
    return path if path.exists() else ROOT / "docs" / "site" / page


def link(name: str) -> str:
    """Return a link to a public name."""
    return f"[`{name}`][{name}]"


def source(module: str) -> ast.Module:
    """Return the syntax tree of a module of the library."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        raise PluginError(f"A public name needs its module. Received: {module}, which has no file.")
    return ast.parse(path.read_text())


def summary(module: str) -> str:
    """Return the first paragraph of a module's docstring."""
    return (ast.get_docstring(source(module)) or "").split("\n\n")[0]


def constants(module: str) -> dict[str, Any]:
    """Return what a module assigns to names, as far as it consists of literals."""
    found = {}
    for name, node in assigned(source(module).body):
        try:
            found[name] = eval(compile(ast.Expression(node), module, "eval"), {"__builtins__": {}})
        except NameError:
            continue
    return found


def exported(place: str) -> list[str]:
    """Return `__all__` of a module of the library."""
    names = constants(f"tfscale.{place}").get("__all__")
    if names is None:
        raise PluginError(f"A public module needs a literal __all__. Received: tfscale.{place}.")
    return names


def require(target: str) -> None:
    """Raise PluginError unless a module defines or imports a public name."""
    module, _, name = target.rpartition(".")
    body = source(module).body
    bound = {each for each, _ in assigned(body)}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            bound.update(alias.asname or alias.name for alias in node.names)
    if name not in bound:
        raise PluginError(f"A public name must exist. Received: {name}, which {module} lacks.")


def assigned(body: Iterable[ast.stmt]) -> Iterable[tuple[str, ast.expr]]:
    """Yield names and values of plain assignments."""
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value
