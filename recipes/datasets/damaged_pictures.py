"""Damaged pictures: found once, left out with a count, and refused where they are many."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

import tfscale
from tfscale.files import sha256

MOST = 0.01  # of all pictures


def find(
    read: Callable[..., Any], records: tuple[Sequence[Any], ...], stamp: str, cache_dir: str
) -> list[int]:
    """Return the positions of the records that cannot be decoded.

    Each rank decodes its share once, in parallel. What was found is kept in `cache_dir`; where
    that cannot be written every run finds it again.

    Collective: all ranks must call it, with the same arguments.

    Args:
        read: Decodes a record, in a tf.data graph; fails if it is damaged.
        records: One or more sequences of equal length, the arguments of `read`.
        stamp: What identifies the files: names, sizes, times. See `stamp_of`.
        cache_dir: Folder, made if it is missing.
    """
    known = Path(cache_dir) / f"damaged-{sha256(stamp.encode())[:16]}.json"
    kept = _kept_in(known) if tfscale.rank() == 0 else None
    kept = tfscale.broadcast_object(kept, 0, name="damaged pictures known")
    if kept is not None:
        return kept
    own = range(tfscale.rank(), len(records[0]), tfscale.size())
    sound = _sound(read, own, records)
    shares = tfscale.allgather_object(set(own) - sound, name="damaged pictures")
    damaged = sorted(set().union(*shares))
    if tfscale.rank() == 0:
        _keep(damaged, known)
    return damaged


def _kept_in(known: Path) -> list[int] | None:
    """Return the results of an earlier run; None if there is no such file, or it was cut."""
    try:
        kept = json.loads(known.read_bytes())
    except (OSError, ValueError):
        return None
    is_sound = isinstance(kept, list) and all(type(position) is int for position in kept)
    return kept if is_sound else None


def _keep(damaged: Sequence[int], known: Path) -> None:
    """Write what was found, so that the next run need not look; data sets may be read-only."""
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        (known.parent / ".gitignore").write_text("*\n")
        temporary = known.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(damaged))
        os.replace(temporary, known)
    except OSError as error:
        logging.warning(
            "Damaged pictures cannot be noted in %s (%s): the next run looks for them again.",
            known.parent,
            error,
        )


def _sound(
    read: Callable[..., Any], own: Sequence[int], records: tuple[Sequence[Any], ...]
) -> set[int]:
    """Return those of some positions that can be decoded."""
    if not own:
        return set()
    columns = tuple([column[position] for position in own] for column in records)

    def check(position: tf.Tensor, record: Any) -> tf.Tensor:
        decoded = tf.nest.flatten(read(*record))
        # The result depends on what is decoded: control dependencies would be optimised away.
        is_there = tf.reduce_all([tf.size(part) > 0 for part in decoded])
        return tf.where(is_there, position, -1)

    dataset = tf.data.Dataset.from_tensor_slices((list(own), columns))
    checked = dataset.map(check, num_parallel_calls=tf.data.AUTOTUNE).ignore_errors()
    return {int(position) for position in checked.as_numpy_iterator()}


def stamp_of(paths: Sequence[Path]) -> str:
    """Return names, sizes and times of the files that exist, in words."""
    facts = ((path, path.stat()) for path in paths if path.exists())
    return "\n".join(
        f"{path.parent.name}/{path.name} {stat.st_size} {stat.st_mtime_ns}" for path, stat in facts
    )


def without(names: Sequence[str], damaged: Sequence[int], lost: int = 0) -> list[int]:
    """Return the positions that are left, and say on rank 0 how many are not.

    Args:
        names: Of all pictures.
        damaged: Positions of those that are damaged.
        lost: Further ones that are not even among `names`.

    Raises:
        ValueError: More than 1 % are damaged or lost.
    """
    count = len(damaged) + lost
    if not count:
        return list(range(len(names)))
    first = ", ".join([names[position] for position in damaged][:5])
    found = f"{count} of {len(names) + lost} pictures are damaged{': ' if first else ''}{first}"
    if count > MOST * (len(names) + lost):
        raise ValueError(
            f"At most {100 * MOST:g} % of the pictures may be damaged. Received: {found}. "
            "Get the data set again."
        )
    if tfscale.rank() == 0:
        logging.warning("%s. They are left out.", found)
    bad = set(damaged)
    return [position for position in range(len(names)) if position not in bad]
