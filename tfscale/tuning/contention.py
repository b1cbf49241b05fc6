"""What computing and communication take from each other where they share cores."""

from __future__ import annotations

import dataclasses

from tfscale.tuning.layer_probe import LayerMeasurement

_LEAST_SHARE = 0.1
_LEAST_MESSAGES = 0.2


def separate(
    alone: LayerMeasurement, together: LayerMeasurement
) -> tuple[LayerMeasurement, float, float]:
    """Take steps apart whose exchanges ran during back-propagation.

    Args:
        alone: Of steps that sent nothing before all gradients existed: nothing disturbs what is
            computed, nor the messages.
        together: Of steps that sent each layer's gradients as soon as they existed.

    Returns:
        The second measurement with the durations that computing and messages have alone, and the
        shares (`Machine.compute_share`, `Machine.message_share`) that make them what they were.
    """
    computed = max(together.ready_s)
    wire, wire_alone = together.wire_s, alone.wire_s
    if computed <= 0 or wire <= 0:
        return together, 1.0, 1.0
    before_s = min(together.before_s, alone.before_s)
    undisturbed = min(1.0, max((alone.before_s - before_s) / computed, 1e-3))
    is_busy = min(1.0, wire / computed)  # part of back-propagation with messages under way
    compute_share = max(_LEAST_SHARE, 1 - (1 - undisturbed) / is_busy)
    # Computing kept them waiting during this part of their time only.
    is_shared = min(1.0, computed / wire)
    message_share = 1 - (1 - wire_alone / wire) / is_shared
    message_share = min(1.0, max(_LEAST_MESSAGES, message_share))
    # Where the share had to be cut off, computing was as slow as it seems for other reasons.
    undisturbed = 1 - (1 - compute_share) * is_busy
    found = dataclasses.replace(
        together,
        before_s=before_s,
        ready_s=tuple(undisturbed * ready for ready in together.ready_s),
        message_s=alone.message_s,
        byte_s=alone.byte_s,
    )
    return found, compute_share, message_share
