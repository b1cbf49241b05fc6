"""Table of what hides the gather of parameters; see `worker_gathers`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.kernel_times import BACKWARD, FORWARD
from benchmarks.markdown import milliseconds, table
from benchmarks.rows import Runs

_DURING = {FORWARD: "during the forward pass", BACKWARD: "during back-propagation"}
_EXPOSED = "during no kernel"


def gathers_of(runs: Runs) -> list[dict[str, Any]]:
    """Return the runs that say what hides gathers."""
    return [run for run in runs if run["suite"] == "gathers" and "error" not in run]


def gathers_table(runs: Runs) -> str:
    """Return a line per model: medians and quartiles over the steps of all ranks and runs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in gathers_of(runs):
        groups.setdefault(run["group"], []).append(run)
    lines = []
    for group, found in groups.items():
        steps = [step for run in found for rank in run["shares"] for step in rank]
        ahead = [seconds for run in found for rank in run["ahead_s"] for seconds in rank]
        wire = [seconds for run in found for seconds in run["samples"]["wire"]]
        shares = [_percent([step[name] for step in steps]) for name in (*_DURING, "exposed")]
        ranks = f"{found[0]['n_ranks']} ranks"
        lines.append([group, ranks, milliseconds(wire), *shares, milliseconds(ahead)])
    head = ["model and links", "where", "gathers on the wire, ms", *_DURING.values(), _EXPOSED]
    return table([*head, "forward begins before the last gather ends, ms"], lines)


def _percent(shares: list[float]) -> str:
    low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
    return f"{100 * middle:.0f} % ({100 * low:.0f}..{100 * high:.0f})"
