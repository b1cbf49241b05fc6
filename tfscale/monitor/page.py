"""The page of metrics that rank 0 serves, in Prometheus's text format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Numbers:
    """Numbers of a training at one moment; None where one is not known.

    Attributes:
        ranks: Number of ranks.
        restarts: How often `tfscale run` has started the job again.
        epoch: The epoch that runs or ran last, counted from 1; 0 before the first.
        epochs: Number of the last epoch that `fit` may run.
        step: Steps of this epoch that have ended.
        steps_per_epoch: Steps of an epoch.
        steps: Steps since this process began.
        samples: Samples of these steps, over all ranks.
        steps_per_s: Steps per second of the last seconds.
        samples_per_s: The same for samples.
        step_s: Mean seconds of the last steps.
        exposed_s: Seconds of such a step in which rank 0 waited for communication.
        n_bytes: Bytes that rank 0 has given to collectives.
        waited_s: For each rank, the seconds for which it has waited for other ranks.
        late_s: For each rank, by how much less it has waited than the one that waited most, in the
            last five seconds. All wait for the rank that comes last, so its number is the largest.
        metrics: Loss and metrics of the last epoch that has ended.
        progress: Share of the `fit` that is done, in [0, 1].
        remaining_s: Seconds until its end, at the mean speed so far.
    """

    ranks: int = 1
    restarts: int = 0
    epoch: int = 0
    epochs: int | None = None
    step: int = 0
    steps_per_epoch: int | None = None
    steps: int = 0
    samples: int = 0
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    step_s: float | None = None
    exposed_s: float | None = None
    n_bytes: int = 0
    waited_s: tuple[float, ...] = ()
    late_s: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    progress: float | None = None
    remaining_s: float | None = None


# Name, type, help, and the attribute of `Numbers`.
_FAMILIES = (
    ("ranks", "gauge", "Number of ranks.", "ranks"),
    ("restarts", "gauge", "How often the job was started again.", "restarts"),
    ("epoch", "gauge", "Epoch that runs or ran last, counted from 1.", "epoch"),
    ("epochs", "gauge", "Last epoch that fit may run.", "epochs"),
    ("step", "gauge", "Steps of this epoch that have ended.", "step"),
    ("steps_per_epoch", "gauge", "Steps of an epoch.", "steps_per_epoch"),
    ("steps_total", "counter", "Steps since the program began.", "steps"),
    ("samples_total", "counter", "Samples of these steps, over all ranks.", "samples"),
    ("steps_per_second", "gauge", "Steps per second of the last seconds.", "steps_per_s"),
    ("samples_per_second", "gauge", "Samples per second, over all ranks.", "samples_per_s"),
    ("step_seconds", "gauge", "Mean seconds of the last steps.", "step_s"),
    (
        "step_exposed_seconds",
        "gauge",
        "Seconds of such a step in which rank 0 waited for communication.",
        "exposed_s",
    ),
    ("exchanged_bytes_total", "counter", "Bytes that rank 0 gave to collectives.", "n_bytes"),
    ("progress_ratio", "gauge", "Share of the fit that is done.", "progress"),
    ("remaining_seconds", "gauge", "Seconds until the end of the fit.", "remaining_s"),
)
_OF_RANKS = (
    (
        "rank_waiting_seconds_total",
        "counter",
        "Seconds for which a rank has waited for others. The late rank waits least.",
        "waited_s",
    ),
    (
        "rank_late_seconds",
        "gauge",
        "Seconds, of the last five, that the rank which waited most has waited more than this.",
        "late_s",
    ),
)


def render(numbers: Numbers) -> str:
    """The page of metrics: text in Prometheus's format, version 0.0.4.

    Examples:
        >>> from tfscale.monitor.page import Numbers, render
        >>> page = render(Numbers(epoch=2, metrics={"loss": 0.25}))
        >>> [line for line in page.splitlines() if line.startswith(("tfscale_epoch", "tfscale_m"))]
        ['tfscale_epoch 2', 'tfscale_metric{name="loss"} 0.25']
    """
    lines: list[str] = []
    for name, kind, text, attribute in _FAMILIES:
        value = getattr(numbers, attribute)
        if value is not None:
            lines += _family(name, kind, text, [("", value)])
    for name, kind, text, attribute in _OF_RANKS:
        values = getattr(numbers, attribute)
        labelled = [(f'{{rank="{rank}"}}', value) for rank, value in enumerate(values)]
        lines += _family(name, kind, text, labelled)
    of_epoch = [(f'{{name="{_escaped(key)}"}}', v) for key, v in numbers.metrics.items()]
    lines += _family("metric", "gauge", "Loss and metrics of the last epoch.", of_epoch)
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> Iterator[str]:
    head = [f"# HELP tfscale_{name} {text}", f"# TYPE tfscale_{name} {kind}"]
    for labels, value in samples:
        yield from head
        yield f"tfscale_{name}{labels} {_number(value)}"
        head = []


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
