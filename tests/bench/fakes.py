"""Cells of one group, and runs of them that nothing measured."""

from benchmarks.harness import Cell


def cell(system, place="1gbit"):
    return Cell("step", "vgg 1gbit", system, place, 4, ("--model", "vgg"))


CELLS = [cell("compute", "memory"), cell("tfscale-allreduce"), cell("horovod")]


def run(system, number, seconds, session="s", commit="abc"):
    """A run as a file has it, of three equal steps."""
    where = {"suite": "step", "group": "vgg 1gbit", "place": "1gbit", "n_ranks": 4}
    origin = {"session": session, "commit": commit, "arguments": ["--model", "vgg"]}
    found = {"samples": {"vgg": [seconds] * 3}, "load": [1.0, 2.0]}
    return {**where, **origin, "system": system, "round": number, **found}
