"""Reading the parts of a checkpoint at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.checkpoints.parts import Arrays, DamagedError

Range = tuple[int, int]


class Reader:
    """Arrays of a checkpoint by rank and name, and what several ranks' arrays make together.

    Attributes:
        infos: What each rank wrote beside its arrays.
        size: Number of ranks that wrote.
        groups: Ranks whose models were equal; one group but for local SGD.
    """

    def __init__(self, folder: Path, manifests: Sequence[dict[str, Any]]) -> None:
        """Read nothing yet.

        Args:
            folder: Of the checkpoint.
            manifests: Of all parts, in rank order.
        """
        self._folder = folder
        self._manifests = manifests
        self._files: dict[int, Arrays] = {}
        self.infos = [manifest["info"] for manifest in manifests]
        self.size = len(manifests)
        self.groups: list[list[int]] = self.infos[0]["groups"]

    def _arrays(self, rank: int) -> Arrays:
        if rank not in self._files:
            self._files[rank] = Arrays(self._folder, self._manifests[rank])
        return self._files[rank]

    def has(self, rank: int, name: str) -> bool:
        """Return whether a rank wrote an array of that name."""
        return name in self._arrays(rank).names

    def get(self, rank: int, name: str) -> np.ndarray:
        """Return an array.

        Raises:
            DamagedError: There is none.
        """
        return self._arrays(rank)[name]

    def getter(self, name: str) -> Callable[[int], np.ndarray]:
        """Return a function of a rank that reads its array of that name."""
        return lambda rank: self.get(rank, name)

    def mean(self, ranks: Sequence[int], get: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return the mean of what `get` returns for some ranks; the value itself if all are equal.

        Integers have no mean: the first rank's are taken.
        """
        values = [get(rank) for rank in ranks]
        first = values[0]
        is_integer = first.dtype.kind in "iub"
        if is_integer or all(np.array_equal(v, first, equal_nan=True) for v in values[1:]):
            return first
        return np.mean(np.asarray(values, np.float64), axis=0).astype(first.dtype)

    def slot(self, name: str, group: Sequence[int], want: Range | None) -> np.ndarray:
        """Return an optimizer's variable as a group held it, or a range of its flat elements.

        Args:
            name: "optimizer/variable", by number.
            group: Ranks that shared it; the first one wrote what each of them had.
            want: First element and the one behind the last; None for all.

        Returns:
            An array; flat where ranks held ranges.

        Raises:
            DamagedError: Parts do not fit together.
        """
        whole = f"optimizer{name}"
        if self.has(group[0], whole):
            value = self.get(group[0], whole)
            return value if want is None else value.reshape(-1)[slice(*want)]
        if want is not None and want[0] == want[1]:
            return np.zeros(0)
        pieces = []
        for rank in group:
            if self.has(rank, f"part{name}"):
                held = self.infos[rank]["ranges"][name]
                if held is None:
                    value = self.get(rank, f"part{name}")
                    return value if want is None else value.reshape(-1)[slice(*want)]
                if want is None or (held[0] < want[1] and want[0] < held[1]):
                    pieces.append((held[0], rank))
        arrays, begin, end = [], sorted(pieces)[0][0] if pieces else 0, None
        for first, rank in sorted(pieces):
            if end is not None and first != end:
                raise DamagedError(f"parts of optimizer variable {name} do not fit together")
            arrays.append(self.get(rank, f"part{name}").reshape(-1))
            end = first + arrays[-1].size
        if not arrays:
            raise DamagedError(f"nobody wrote optimizer variable {name}")
        flat = np.concatenate(arrays)
        return flat if want is None else flat[want[0] - begin : want[1] - begin]

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files = {}
