"""Nothing gets long: files, functions and lists of parameters."""

import ast
from pathlib import Path

from tests.helpers.sources import CPP, MODULES, functions, relative

# Limits, and what is above them. An entry may shrink and go, never grow; new ones need a reason.
MAX_LINES = {".py": 250, ".h": 150, ".cc": 250}
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 6
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
# Signatures that follow Horovod's or Keras's, or whose arguments are all by keyword.
MANY_PARAMETERS: dict[str, int] = {
    "tfscale/collectives.py:allreduce": 8,
    "tfscale/collectives.py:grouped_allreduce": 7,
    "tfscale/optimizer.py:DistributedOptimizer.__init__": 16,
    "tfscale/optimizers/lars.py:LARS.__init__": 7,
    "tfscale/tape.py:DistributedGradientTape.__init__": 12,
    "tfscale/callbacks/adaptive_batch_size.py:AdaptiveBatchSize.__init__": 17,
    "tfscale/callbacks/learning_rate.py:LearningRateScheduleCallback.__init__": 7,
    "tfscale/data/global_batches.py:GlobalBatches.__init__": 7,
    "tfscale/data/global_batches.py:GlobalBatches.from_dataset": 7,
}


def check_limits(measured: dict[str, int], limit: dict[str, int] | int, known: dict[str, int]):
    """Above the limit is what is known, not more, and nothing that is known has shrunk."""

    def limit_of(name: str) -> int:
        return limit if isinstance(limit, int) else limit[Path(name).suffix]

    above = {name: value for name, value in measured.items() if value > limit_of(name)}
    wrong = [
        f"{name}: {above.get(name, 'within the limit')}, known exception: {known.get(name)}"
        for name in sorted(above.keys() | known.keys())
        if above.get(name) != known.get(name)
    ]
    assert not wrong, "split by concept; or shorten the list of exceptions:\n" + "\n".join(wrong)


def test_file_lengths():
    measured = {relative(p): len(p.read_text().splitlines()) for p in [*MODULES, *CPP]}
    check_limits(measured, MAX_LINES, LONG_FILES)


def test_function_lengths():
    """Lines without the docstring."""
    measured = {}
    for path in MODULES:
        for name, node in functions(path):
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                text = node.body[0]
                n_lines -= (text.end_lineno or text.lineno) - text.lineno + 1
            measured[f"{relative(path)}:{name}"] = n_lines
    check_limits(measured, MAX_FUNCTION_LINES, LONG_FUNCTIONS)


def test_parameter_counts():
    measured = {}
    for path in MODULES:
        for name, node in functions(path):
            if name.startswith("test_"):
                continue  # its parameters are fixtures and cases
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            n_parameters = len([a for a in given if a.arg not in ("self", "cls")])
            measured[f"{relative(path)}:{name}"] = n_parameters
    check_limits(measured, MAX_PARAMETERS, MANY_PARAMETERS)
