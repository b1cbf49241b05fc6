"""Name what differs between two ways to compute a step, and the usual causes. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_MAX_SHOWN = 6
_MARGIN = 4  # rounding errors of other weights may decide more than those that were tried


@dataclass(frozen=True)
class Value:
    """A result of a step.

    Attributes:
        kind: "loss or metric", "gradient", "variable" or "output".
        name: Its name in the logs, its path, or its position.
        array: The value.
        change: Of a variable, what the step added to it; else the value.
    """

    kind: str
    name: str
    array: np.ndarray
    change: np.ndarray


@dataclass(frozen=True)
class Difference:
    """A value that is not that of one process.

    Attributes:
        kind: That of the value.
        text: What differs, in words.
        ratio: The combined value divided by that of one process; NaN if not proportional to it.
    """

    kind: str
    text: str
    ratio: float


def find_differences(
    alone: Mapping[tuple[str, str], Value],
    combined: Mapping[tuple[str, str], Value],
    epsilon: float,
    nudged: Sequence[Mapping[tuple[str, str], Value]] = (),
) -> tuple[Difference, ...]:
    """Return what differs by more than sums in another order do, gradients last.

    Values may differ by the square root of the precision, or 1e-6: errors of a wrong formula are
    larger, those of rounding smaller. A gradient whose sum cancels out, such as that of a bias in
    front of a BatchNormalization, is compared with the largest of the others.

    Where a value next to 0 enters a ReLU, its rounding error decides which slope counts, and the
    gradient jumps. How far shows in `nudged`.

    Args:
        alone: The values of one process, by kind and name.
        combined: Those of all ranks together.
        epsilon: The distance of 1.0 to the next number of the least precise dtype.
        nudged: Those of one process whose weights differ by rounding errors. Values may differ by
            `_MARGIN` times as much as these do.
    """
    tolerance = max(epsilon**0.5, 1e-6)  # some ops, such as CTC, compute in float32 at most
    gradients = [v.array for (kind, _), v in alone.items() if kind == "gradient" and v.array.size]
    largest = max((_magnitude(array) for array in gradients), default=0.0)
    differences = []
    for key, value in alone.items():
        other = combined.get(key)
        if other is None and value.kind == "variable" and not np.any(value.change):
            continue  # neither way changes it
        if other is None or other.array.shape != value.array.shape:
            shape = None if other is None else other.array.shape
            text = f"{value.kind} {value.name!r} has shape {shape} instead of {value.array.shape}"
            differences.append(Difference(value.kind, text, float("nan")))
            continue
        if value.array.dtype.kind in "iub":
            if not np.array_equal(value.array, other.array):
                differences.append(_describe(value, other))
            continue
        allowed = tolerance * _magnitude(value.change)
        if value.kind == "gradient":
            allowed += min(1e3 * epsilon, 0.01) * largest
        allowed += 64 * epsilon * _magnitude(value.array)
        with np.errstate(invalid="ignore"):  # infinite values
            jumps = [_magnitude(other_run[key].array - value.array) for other_run in nudged]
            allowed += _MARGIN * max(jumps, default=0.0)
            distance = np.abs(value.array.astype(np.float64) - other.array.astype(np.float64))
        are_equal = ~(np.isfinite(value.array) | np.isfinite(other.array))
        if not np.all(are_equal | (distance <= allowed)):
            differences.append(_describe(value, other))
    order = ("output", "loss or metric", "variable", "gradient")
    return tuple(sorted(differences, key=lambda difference: order.index(difference.kind)))


def _magnitude(array: np.ndarray) -> float:
    """Return the largest finite magnitude."""
    finite = array[np.isfinite(array)] if array.size else array
    return float(np.max(np.abs(finite.astype(np.float64)))) if finite.size else 0.0


def _describe(value: Value, other: Value) -> Difference:
    a: np.ndarray = value.change.astype(np.float64).ravel()
    b: np.ndarray = other.change.astype(np.float64).ravel()
    ratio = float("nan")
    if np.all(np.isfinite(a)) and np.all(np.isfinite(b)) and np.any(a):
        factor = float(np.dot(a, b) / np.dot(a, a))
        if _magnitude(b - factor * a) <= 1e-3 * _magnitude(a):
            ratio = factor
    if a.size == 1:
        x, y = value.array.ravel()[0], other.array.ravel()[0]
        text = f"{value.kind} {value.name!r} is {y:.7g} instead of {x:.7g}"
    elif not np.isnan(ratio):
        text = f"{value.kind} {value.name!r} is {ratio:.4g} times that of one process"
    else:
        share = _magnitude(b - a) / (_magnitude(a) or 1.0)
        text = f"{value.kind} {value.name!r} differs by up to {share:.2g} of its largest value"
    return Difference(value.kind, text, ratio)


_COUPLED = (
    "a layer or loss that combines the rows of a batch, such as a mean over axis 0, "
    "tensordot(users, items), in-batch negatives: gather the rows by tfscale.allgather"
)
_SUM = (
    "a sum over the batch, or a mean with a divisor of its own, in a loss of train_step or "
    "add_loss: return one value per sample from Loss.call, or a mean over the rows"
)
_RANDOM = "random numbers whose rows are not those of the batch: draw them for each part by itself"
_METRIC = (
    "a metric whose state is no sum over the rows: set its attribute tfscale_reduce to 'mean', "
    "'max' or 'min'"
)


def explain(method: str, n_ranks: int, differences: Sequence[Difference]) -> str:
    """Return the text of an error: what differs, why that usually is, and what to do."""
    kinds = {difference.kind for difference in differences}
    ratios = [d.ratio for d in differences if d.kind == "gradient"]
    if kinds == {"output"}:
        causes = [_COUPLED]
    elif ratios and np.allclose(ratios, 1 / n_ranks, rtol=1e-2):
        causes = [_SUM]
    elif kinds == {"loss or metric"}:
        causes = [_METRIC, _SUM, _COUPLED]
    else:
        causes = [_COUPLED, _SUM, _RANDOM]
    shown = "; ".join(difference.text for difference in differences[:_MAX_SHOWN])
    if len(differences) > _MAX_SHOWN:
        shown += f"; and {len(differences) - _MAX_SHOWN} more"
    listed = " ".join(f"({number}) {cause}." for number, cause in enumerate(causes, 1))
    return (
        f"{method} on {n_ranks} ranks differs from a step of one process; no weight was changed. "
        f"Received: {shown}. Usual causes, the likeliest first: {listed} With --verify off, or "
        "verify='off', the script trains all the same. See 'An unchanged script', section "
        "'Verification', in the documentation."
    )
