"""Numbers of slots: of collectives from 0 on, of stamps below. TensorFlow is not needed here."""

from __future__ import annotations

from typing import Any

STAMP = "TfscaleStamp"
# Slot of the stamp of a step's batch. Those below are of gathers that an earlier step posted: the
# time at which the first layer that reads the parameters has its inputs.
INPUT_SLOT = -1_000_000


def wait_slot(slot: int) -> int:
    """Return the slot of the stamp for a gather, or the slot of the gather of a stamp."""
    return INPUT_SLOT - 1 - slot


def has_slot(op: Any) -> bool:
    """Return whether an op of TensorFlow is a collective or a stamp.

    One that waits for parameters, or merges an average into them, is not.
    """
    return op.type.startswith("Tfscale") and op.type not in ("TfscaleAwait", "TfscaleMerge")
