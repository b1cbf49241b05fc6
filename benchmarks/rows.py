"""Results by group and case, as the tables and pictures read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.numbers import physical_limit, spread
from benchmarks.places import Place, parse_place

# Suites whose workers measure two systems in turn: the one that is added to, and what is added.
IN_TURN = {
    "single": ("keras", "tfscale"),
    "report": ("without", "with"),
    "fit": ("train_on_batch", "fit"),
}
_FACTS = ("n_parameters", "allreduce_bytes", "least_bytes", "predicted_s")
Runs = Sequence[dict[str, Any]]
Turn = tuple[str, str, int]  # session, commit, round: what ran in the same one was in turn


@dataclass(frozen=True)
class Row:
    """One case of one group: samples per round of each system.

    Attributes:
        group: Of the cells.
        case: Bytes or model.
        place: Of the systems that exchange.
        n_ranks: Number of ranks.
        rounds: Per system and turn the durations in seconds.
        facts: What the workers found out besides, such as "allreduce_bytes".
        sent_bytes: Per system what the link of a host sent per call in each run.
    """

    group: str
    case: str
    place: str
    n_ranks: int
    rounds: dict[str, dict[Turn, list[float]]]
    facts: dict[str, float]
    sent_bytes: dict[str, list[float]] = field(default_factory=dict)

    @property
    def where(self) -> Place:
        """Hosts, ranks and links."""
        return parse_place(self.place, self.n_ranks)

    def samples(self, system: str) -> list[float]:
        """Return the durations of all rounds."""
        return [seconds for one in self.rounds[system].values() for seconds in one]

    def median_s(self, system: str) -> float:
        """Return the median over all rounds."""
        return spread(self.samples(system)).median


def collect(runs: Runs, suite: str) -> list[Row]:
    """Gather the runs of a suite by group and case; failed runs are left out."""
    rows: dict[tuple[str, str], Row] = {}
    for run in sorted(runs, key=lambda run: run["round"]):
        if run["suite"] != suite or "error" in run:
            continue
        for run_case, samples in run["samples"].items():
            case, system = run_case, run["system"]
            if suite in IN_TURN:  # both systems in one run, as its cases
                case, system = run["group"], run_case
            place = run["group"].split()[-1]
            empty = Row(run["group"], case, place, run["n_ranks"], {}, {})
            row = rows.setdefault((run["group"], case), empty)
            # Computing alone has no links, and what "auto" predicts is for a step without input.
            if run.get("place", place) == place and not system.endswith("-fit"):
                row.facts.update({k: run[k] for k in _FACTS if k in run})
            turn = (run["session"], run["commit"], run["round"])
            row.rounds.setdefault(system, {})[turn] = samples
            if sent := run.get("sent_bytes", {}).get(run_case):
                row.sent_bytes.setdefault(system, []).append(sent)
    return list(rows.values())


def systems_of(rows: Sequence[Row]) -> list[str]:
    """Return all systems, in the order in which they took turns."""
    return list(dict.fromkeys(system for row in rows for system in row.rounds))


def step_limit(row: Row, which: str) -> float | None:
    """Return the physical limit of a step in seconds, or None where computing was not measured.

    Args:
        row: Of the step suite.
        which: "allreduce_bytes" or "least_bytes".
    """
    if "compute" not in row.rounds or which not in row.facts:
        return None
    return physical_limit(row.median_s("compute"), row.facts[which], row.where.rate_bits_s)
