"""Compare two runs of a script: the lines that it printed, the files that it wrote."""

import difflib
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)(?!\w)", re.IGNORECASE)
# "4/7 ━━━━━━ 0s 2ms/step - loss: 0.1" and "7/7 - 1s - 150ms/step - loss: 0.1".
_BAR = re.compile(r"\s*(\d+)/(\d+|Unknown)[ ━-]+\d[\d:]*s(?: -)? \d+(?:s|ms|us)/(?:step|epoch)(.*)")
_ESCAPES = re.compile(r"\x1b\[[\d;]*m|\x08")
# Keras has the same name for them every time, but for time, host and process.
_EVENTS = re.compile(r"events\.out\.tfevents\..*")
# Keys of a saved model's JSON: a date, and the address of an object.
_OF_A_RUN = ("date_saved", "shared_object_id")

Content = dict[str, Any]  # Parts of a file, each an array or a text.


def read_lines(output: str) -> list[str]:
    """Return what was printed, without empty lines, times, and bars of unfinished epochs."""
    lines = []
    for line in _ESCAPES.sub("", output).split("\n"):
        shown = line.rpartition("\r")[2].rstrip()
        if bar := _BAR.fullmatch(shown):
            is_complete = bar[1] == bar[2]
            shown = f"{bar[1]}/{bar[2]}{bar[3]}" if is_complete else ""
        lines += [shown] if shown else []
    return lines


def read_files(folder: Path) -> dict[str, Content]:
    """Return the content of all files below a folder, by their relative paths."""
    contents: dict[str, Content] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = _EVENTS.sub("events", path.relative_to(folder).as_posix())
        while name in contents:  # A file of events that one process alone would not write.
            name += " (another)"
        contents[name] = _read_file(path)
    return contents


def _read_file(path: Path) -> Content:
    if path.name.startswith("events.out."):
        return _read_events(path)
    if zipfile.is_zipfile(path):  # .keras and .npz
        with zipfile.ZipFile(path) as archive:
            return {
                f"{member}:{part}": value
                for member in archive.namelist()
                for part, value in _read_member(member, archive.open(member)).items()  # type: ignore[arg-type]
            }
    with path.open("rb") as file:
        return _read_member(path.name, file)


def _read_member(name: str, file: BinaryIO) -> Content:
    if name.endswith(".h5"):
        arrays: Content = {}
        with h5py.File(file) as weights:
            weights.visititems(
                lambda part, item: (
                    arrays.update({part: item[()]}) if isinstance(item, h5py.Dataset) else None
                )
            )
        return arrays
    if name.endswith(".npy"):
        return {"array": np.load(file)}
    text = file.read().decode()
    if name.endswith(".json"):
        leaves = _leaves(json.loads(text))
        return {path: leaf for path, leaf in leaves if path.rpartition("/")[2] not in _OF_A_RUN}
    return {"text": text}


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of each leaf; an empty dictionary or list is one."""
    if isinstance(tree, dict | list) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _leaves(value, f"{path}/{key}")
    else:
        yield path, str(tree)


def _read_events(path: Path) -> Content:
    """Return the scalars; what else is in there describes graphs, which differ."""
    # Imported here: one script writes events.
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    scalars: Content = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                scalars[f"{value.tag}, step {event.step}"] = make_ndarray(value.tensor)
    return scalars


def compare_lines(expected: list[str], found: list[str], tolerance: float) -> list[str]:
    """Return the differences of printed lines."""
    frames, others = ([_frame(line) for line in lines] for lines in (expected, found))
    if frames != others:
        return list(difflib.unified_diff(frames, others, n=0, lineterm=""))[2:]
    pairs = enumerate(zip(expected, found, strict=True), 1)
    differences = ((n, _compare_texts(a, b, tolerance)) for n, (a, b) in pairs)
    return [f"line {n}: {difference}" for n, difference in differences if difference]


def compare_files(
    expected: Mapping[str, Content], found: Mapping[str, Content], tolerance: float
) -> list[str]:
    wrong = [f"missing: {name}" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"in addition: {name}" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        parts, others = expected[name], found[name]
        wrong += [f"{name}, missing: {part}" for part in sorted(parts.keys() - others.keys())]
        wrong += [f"{name}, in addition: {part}" for part in sorted(others.keys() - parts.keys())]
        for part in sorted(parts.keys() & others.keys()):
            compare = _compare_texts if isinstance(parts[part], str) else _compare_arrays
            difference = compare(parts[part], others[part], tolerance)
            wrong += [f"{name}, {part}: {difference}"] if difference else []
    return wrong


def _frame(text: str) -> str:
    """Return a text without its numbers, and without spaces, of which numbers need more or less."""
    return "".join(NUMBER.sub("#", text).split())


def _compare_texts(expected: str, found: str, tolerance: float) -> str:
    if _frame(expected) != _frame(found):
        return f"{found!r} in place of {expected!r}"
    pairs = zip(NUMBER.findall(expected), NUMBER.findall(found), strict=True)
    wrong = [(a, b) for a, b in pairs if not _is_close(float(a), float(b), tolerance)]
    text = ", ".join(f"{b} in place of {a}" for a, b in wrong[:5])
    return f"{text} in {expected[:100]!r}" if wrong else ""


def _is_close(a: float, b: float, tolerance: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance * max(1, abs(a))


def _compare_arrays(expected: np.ndarray, found: np.ndarray, tolerance: float) -> str:
    a, b = np.asarray(expected), np.asarray(found)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{b.dtype}{list(b.shape)} in place of {a.dtype}{list(a.shape)}"
    is_close = a == b
    if a.dtype.kind == "f":
        # float32 rounds numbers that differ by less.
        bound = max(tolerance, 4 * float(np.finfo(a.dtype).eps)) * np.maximum(1.0, np.abs(a))
        is_close = is_close | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= bound)
    if np.all(is_close):
        return ""
    where = tuple(int(i) for i in np.argwhere(~np.atleast_1d(is_close))[0])
    values = f"{np.atleast_1d(b)[where]} in place of {np.atleast_1d(a)[where]} at {list(where)}"
    return f"{values}, {np.size(is_close) - np.sum(is_close)} of {a.size} values"
