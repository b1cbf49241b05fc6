"""Mutation test of the engine in the simulator: break one operator or bound at random places.

    python tools/mutate_engine.py --seed 7cd378f2 [--places 30] [--only 3,4] [--list]
    python tools/mutate_engine.py --seed 7cd378f2 --fixes     # mistakes that were mended, put back

The seed, usually the first eight hex digits of a commit, chooses the places. Each mutant of one
source is linked with the other objects of the simulator (tools/simulate_engine.py), which then runs
seeds until an invariant is violated, the engine crashes, or two minutes are over: a survivor.
Results are written to `build/mutation-engine.json` after each place.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import simulate_engine
from mutate import ROOT, Place, cpp_places

OUTPUT = ROOT / "build" / "mutation-engine.json"
FILES = (
    *("scheduler", "leaving", "marks", "pending", "plan_queue"),
    *("reduction", "relayed_reduction", "segment_reduction", "memory_reduction"),
    *("lanes", "quantized_reduction", "gather", "relay", "host_memory", "host_vectors"),
)
# Mistakes that were mended, put back: a file, what stands there, and what stood there.
FIXES = {
    "early gathers send beside others": (
        "scheduler",
        "if (task.may_overtake) task.operation->SetPace(is_early(task) ? early : Pace::kFree);",
        "",
    ),
    "a rank leaves before the others have seen that it is quiet": (
        "leaving",
        "has_left_ = is_seen && marks_.is_quiet();",
        "has_left_ = awaited.empty() && marks_.is_quiet();",
    ),
    "a failed step counts as a run": (
        "scheduler",
        "    queue.Uncount(task);\n",
        "",
    ),
    "a rank that leaves forgets earlier incarnations": (
        "marks",
        "if (kind == MarkKind::kLeft) mark.counts = past_counts_;",
        "",
    ),
    "a stop leaves incomplete runs waiting": (
        "scheduler",
        "    AnnounceGivenUp();\n    // In a smaller",
        "    return;\n    // In a smaller",
    ),
    "marks count incomplete runs": (
        "scheduler",
        "kind == MarkKind::kLeft || n_given_up_ > 0;",
        "kind == MarkKind::kLeft;",
    ),
    "a run that another rank has not begun is waited for": (
        "scheduler",
        "if (has_heard && ending_ && !announced_.empty()) AnnounceGivenUp();",
        "",
    ),
    "notices after the last mark": ("marks", "if (has_seen_all_) return;", ""),
    "a decoded change gather seems to move": ("gather", "  has_computed_ = false;\n", ""),
    "only the oldest collective says whom it waits for": (
        "scheduler",
        "    if (wait.ranks.empty()) return wait;\n",
        "    return wait;\n",
    ),
    "only ranks silent for the limit are named at the end": (
        "stall_watch",
        "FromSeconds(std::min(kAnswerS, limit_s))",
        "FromSeconds(limit_s)",
    ),
    "a rank that left with another's stop has failed": (
        "marks",
        "if (mark.kind != MarkKind::kLeft) return Status::Failed(text);",
        "return Status::Failed(text);",
    ),
    "runs given up after a mark are not announced": (
        "scheduler",
        "if (!tasks.empty() && ending_) AnnounceGivenUp();",
        "",
    ),
    "failures name ranks of the group": (
        "communicator",
        "in_world_.empty() ? rank : in_world_[static_cast<size_t>(rank)]",
        "rank",
    ),
    "an early gather outlives its step": (
        "scheduler",
        "return is_stranded(task) && is_early(task);",
        "return is_early(task) && false;",
    ),
    "a step that fails gives up what the step before has posted": (
        "scheduler",
        "return task.execution >= queue.n_complete_executions();",
        "return task.queue == &queue;",
    ),
    "of several plans only the oldest comparison says whom it waits for": (
        "scheduler",
        "{ add(task, false); }",
        "{ static_cast<void>(task); }",
    ),
}
_NO_PROGRAM = "does not compile"
# Seeds in a process, which ends after so many seconds of a core: a mutant may never end.
BATCH, BATCH_S = 100, 40


def places() -> list[Place]:
    """Return all places, in a fixed order."""
    found: list[Place] = []
    for name in FILES:
        path = ROOT / "custom_ops" / "comm" / f"{name}.cc"
        found += cpp_places(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    return found


def build_fix(name: str, folder: Path) -> Path:
    """Compile the source without a fix; return the simulator that is linked with it."""
    stem, new, old = FIXES[name]
    text = (ROOT / "custom_ops" / "comm" / f"{stem}.cc").read_text(encoding="utf-8")
    if new not in text:
        raise ValueError(f"{stem}.cc must have the fix of {name!r}. Received no {new!r}.")
    source = folder / f"{stem}.cc"
    source.write_text(text.replace(new, old), encoding="utf-8")
    return simulate_engine.build(replaced=source)


def build_mutant(place: Place, folder: Path) -> Path:
    """Compile the changed source; return the simulator that is linked with it."""
    lines = (ROOT / place.file).read_text(encoding="utf-8").splitlines(keepends=True)
    line, end = lines[place.line - 1], place.column + len(place.old)
    lines[place.line - 1] = line[: place.column] + place.new + line[end:]
    source = folder / Path(place.file).name
    source.write_text("".join(lines), encoding="utf-8")
    return simulate_engine.build(replaced=source)


def core_seconds() -> float:
    """Return the time that ended child processes have computed."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _limit_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (BATCH_S, BATCH_S + 1))


def find_violation(program: Path, seconds: float, first_seed: int) -> str:
    """Run seeds for so long, on a core; return the first violation, or an empty string."""
    end, seed = core_seconds() + seconds, first_seed
    while core_seconds() < end:
        command = [str(program), "--seed", str(seed), "--count", str(BATCH), "--stops", "1"]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", preexec_fn=_limit_time
        )
        if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
            return f"no end after {BATCH_S} s"
        if done.returncode < 0:
            return f"the engine ended by signal {-done.returncode}"
        if done.returncode > 0:
            return next(li for li in done.stdout.splitlines() if li.startswith("VIOLATION"))
        seed += BATCH
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Test the mutants; return 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", required=True, help="hex digits, as of a commit")
    parser.add_argument("--places", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=120.0, help="of a core, for each mutant")
    parser.add_argument("--fixes", action="store_true", help="put mended mistakes back instead")
    parser.add_argument("--only", default="", help="comma-separated numbers of places")
    parser.add_argument("--list", action="store_true", help="say what would be changed")
    options = parser.parse_args(argv)
    folder = ROOT / "build" / "sim-mutants"
    folder.mkdir(parents=True, exist_ok=True)
    chosen = random.Random(int(options.seed, 16)).sample(places(), options.places)
    mutants = {
        f"{number:2} {place.file}:{place.line}: {place.old} -> {place.new}": partial(
            build_mutant, place, folder
        )
        for number, place in enumerate(chosen)
    }
    if options.fixes:
        mutants = {
            f"{n:2} {name}": partial(build_fix, name, folder) for n, name in enumerate(FIXES)
        }
    wanted = set(map(int, options.only.split(","))) if options.only else set(range(len(mutants)))
    simulate_engine.build()
    results = []
    for number, (what, build) in enumerate(mutants.items()):
        if number not in wanted:
            continue
        if options.list:
            print(what)
            continue
        start = core_seconds()
        try:
            program = build()
        except simulate_engine.native.BuildError as error:
            if options.fixes:  # their texts are ours
                sys.exit(f"FIXES must hold what compiles. Received: {what}.\n{error}")
            found = _NO_PROGRAM
        else:
            start = core_seconds()
            found = find_violation(program, options.seconds, int(options.seed, 16) % 10**6)
        seconds = core_seconds() - start
        print(f"{what}: {found[:150] or 'SURVIVES'} ({seconds:.0f} s)", flush=True)
        results.append({"mutant": what, "found": found, "seconds": seconds})
        OUTPUT.write_text(json.dumps(results, indent=2))
    survivors = sum(not result["found"] for result in results)
    n_tried = sum(result["found"] != _NO_PROGRAM for result in results)
    print(f"{n_tried - survivors} of {n_tried} mutants that compile were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())
