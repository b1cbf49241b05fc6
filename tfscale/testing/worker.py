"""The program of each rank of `spawn`: many functions after one another, each outcome in a file.

Started as `python -m tfscale.testing.worker FOLDER`; FOLDER/cases.json lists the functions.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
import unittest
from pathlib import Path
from typing import Any

from tfscale.testing.inspect import forget_process_sets
from tfscale.testing.ranks import outcome_path


def run_case(case: str) -> dict[str, Any]:
    """Run a function and return the fields of its `RankResult`."""
    module, _, function = case.partition(":")
    status, text, value, began = "ok", "", None, time.monotonic()
    try:
        body = getattr(importlib.import_module(module), function)
        if keras := sys.modules.get("keras"):
            keras.utils.set_random_seed(1)  # ranks begin alike, whatever ran before
        value = body()
        json.dumps(value)
    except BaseException as error:  # SystemExit is a failure here
        is_skip = isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped"
        status, value = "skipped" if is_skip else "failed", None
        text = str(error) if is_skip else traceback.format_exc()
    seconds = time.monotonic() - began
    return {"status": status, "text": text, "seconds": seconds, "value": value}


def exchange(folder: Path, step: int, rank: int, size: int, outcome: dict[str, Any]) -> set[str]:
    """Write an outcome; return the statuses of all ranks. The parent ends us if one never comes."""
    files = [outcome_path(folder, step, r) for r in range(size)]
    unfinished = files[rank].with_suffix(".unfinished")
    unfinished.write_text(json.dumps(outcome))
    unfinished.replace(files[rank])
    while not all(file.exists() for file in files):
        time.sleep(0.002)
    return {json.loads(file.read_text())["status"] for file in files}


def main(folder: Path) -> None:
    """Run all functions that the folder lists."""
    stack_file = folder / f"stacks..{os.getpid()}"
    stacks = stack_file.open("w")  # kept open for good
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    import tfscale

    tfscale.init()
    rank, size = tfscale.rank(), tfscale.size()
    stack_file.rename(folder / f"stacks.{rank}.{os.getpid()}")
    exchange(folder, 0, rank, size, {"status": "ok"})  # the first limit of time is fair
    for step, case in enumerate(json.loads((folder / "cases.json").read_text()), 1):
        statuses = exchange(folder, step, rank, size, run_case(case))
        if "failed" in statuses and size > 1:
            # What one rank did not do the others may have begun: no state to continue from.
            os._exit(3)
        forget_process_sets()
    tfscale.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
