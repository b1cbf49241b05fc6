"""What each rank of `spawn` runs: many functions after one another, each outcome in a file.

Started as `python -m tests.helpers.worker FOLDER`; FOLDER/cases.json lists the functions.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path


def write(folder: Path, name: str, content: dict) -> None:
    """Write a file that other processes see either complete or not at all."""
    unfinished = folder / f".{name}.{os.getpid()}"
    unfinished.write_text(json.dumps(content))
    unfinished.replace(folder / name)


def run_case(case: str) -> dict:
    module, _, function = case.partition(":")
    start = time.monotonic()
    outcome = {"status": "ok", "text": ""}
    try:
        imported = importlib.import_module(module)
        body = getattr(imported, function)
        why = getattr(body, "engine_only", "") or getattr(imported, "ENGINE_ONLY", "")
        if why and is_on_horovod():
            return {"status": "skipped", "text": f"not on Horovod: {why}", "seconds": 0.0}
        if keras := sys.modules.get("keras"):
            keras.utils.set_random_seed(1)  # ranks begin alike, whatever cases ran before
        body()
    except BaseException as error:
        # pytest's outcomes are no subclasses of Exception, and SystemExit is a failure here.
        skipped = type(error).__name__ == "Skipped"
        text = str(error) if skipped else traceback.format_exc()
        outcome = {"status": "skipped" if skipped else "failed", "text": text}
    return {**outcome, "seconds": time.monotonic() - start}


def is_on_horovod() -> bool:
    from tfscale.comm import runtime

    return runtime.backend().name == "horovod"


def forget_process_sets() -> None:
    """Remove the sets of a case: the next one may name the same ranks."""
    from tfscale.comm import runtime

    for known in list(runtime.known_process_sets()):
        if type(known) is runtime.ProcessSet:  # tfscale shares its own
            runtime.remove_process_set(known)


def wait_for_all(folder: Path, index: int, size: int) -> list[dict]:
    """Wait until every rank has an outcome for this case; the parent ends us if one never has."""
    files = [folder / f"case-{index}.rank-{r}.json" for r in range(size)]
    while not all(f.exists() for f in files):
        time.sleep(0.002)
    return [json.loads(f.read_text()) for f in files]


def main() -> None:
    folder = Path(sys.argv[1])
    stacks = open(folder / f"stacks.pid-{os.getpid()}", "w")  # noqa: SIM115 (kept open for good)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    import tfscale

    tfscale.init()
    rank, size = tfscale.rank(), tfscale.size()
    write(folder, f"ready.rank-{rank}.json", {"pid": os.getpid(), "size": size})
    wait_for_all_ready(folder, size)
    cases = json.loads((folder / "cases.json").read_text())
    for index, case in enumerate(cases):
        write(folder, f"case-{index}.rank-{rank}.json", run_case(case))
        statuses = {outcome["status"] for outcome in wait_for_all(folder, index, size)}
        if "failed" in statuses and size > 1:
            # What one rank did not do the others may have begun: no state to continue from.
            os._exit(3)
        forget_process_sets()
    tfscale.shutdown()
    write(folder, f"end.rank-{rank}.json", {})


def wait_for_all_ready(folder: Path, size: int) -> None:
    """Start the first case together, so that its time limit is fair."""
    while not all((folder / f"ready.rank-{r}.json").exists() for r in range(size)):
        time.sleep(0.002)


if __name__ == "__main__":
    main()
