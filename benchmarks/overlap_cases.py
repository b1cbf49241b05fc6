"""Cases of the overlap suite: batch, first chunk, replicated layers, width, one at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """One training under `Chunked`.

    Attributes:
        batch: Samples of all ranks together.
        first_chunk: k, layers with variables from the last one to the begin of the first chunk,
            replicated ones included, so that it names one boundary whatever f is.
        replicated: f, first dense layers that send activations instead of gradients.
        filters: Filters of each convolution; 0 means the model's own.
    """

    batch: int
    first_chunk: int
    replicated: int
    filters: int = 0

    def __str__(self) -> str:
        width = f"-w{self.filters}" if self.filters else ""
        return f"b{self.batch}-k{self.first_chunk}-f{self.replicated}{width}"


def parse_case(text: str) -> Case:
    """Read "b32-k7-f2", or "b32-k7-f2-w128" with 128 filters.

    Raises:
        ValueError: It is none of this kind.
    """
    found = re.fullmatch(r"b(\d+)-k(\d+)-f(\d+)(?:-w(\d+))?", text)
    if found is None:
        raise ValueError(f"A case is batch, k and f, as in b32-k7-f2. Received: {text!r}.")
    return Case(*(int(number or 0) for number in found.groups()))


# [T] 3.4 has VGG-A with k = 9 and f = 2: of its nine layers, up to conv4_1, two are poolings.
CENTRE = Case(32, 7, 2)
VARIED = {
    "batch": (16, 32, 64, 128),
    "first_chunk": (3, 4, 5, 6, 7, 9, 10),
    "replicated": (0, 1, 2, 3),
    "filters": (128, 256, 512),
}


def cases(centre: Case = CENTRE) -> list[Case]:
    """Return the centre and all cases that differ from it in one number."""
    found = [replace(centre, **{name: n}) for name, values in VARIED.items() for n in values]
    return list(dict.fromkeys([centre, *found]))
