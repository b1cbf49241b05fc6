"""Flags that another flag leaves without effect: refused where the command line has them.

A default that has no effect is no error; `run.json` has what happened.
"""

import sys
from collections.abc import Mapping
from typing import Any

from absl import flags

FLAGS = flags.FLAGS


def check() -> None:
    """Refuse flags of the command line that would change nothing.

    `--interval` without `--groups` is none of them: studies give it to all of their
    configurations, and there is no interval where there is one group.

    Raises:
        SystemExit: There is such a flag; the message says which and why.
    """
    for name in ("adaptive_batch", "batch_schedule"):
        if FLAGS[name].value:
            reason = f"--{name.replace('_', '-')} takes the place of a schedule of the rate."
            refuse(reason, {"schedule": "constant"})
    if FLAGS.average_every:
        reason = "With --average-every ranks train on their own and exchange no gradients."
        none = {"exchange": None, "groups": 1, "interval": None, "compression": "none"}
        refuse(reason, none)
    else:
        refuse("--distance-weights needs --average-every.", {"distance_weights": 0.0})
    if not FLAGS.adaptive_batch:
        refuse("--adaptive-interval needs --adaptive-batch.", {"adaptive_interval": 0})
        refuse("--adaptive-signal needs --adaptive-batch.", {"adaptive_signal": "theta"})


def refuse(reason: str, without_effect: Mapping[str, Any]) -> None:
    """Refuse flags that the command line has.

    Args:
        reason: Why they have no effect, as a sentence.
        without_effect: Names, each with the value that says what happens anyway, which is
            accepted; None where there is none.

    Raises:
        SystemExit: One of them has another value.
    """
    given = [
        _shown(name, FLAGS[name].value)
        for name, accepted in without_effect.items()
        if FLAGS[name].present and (accepted is None or FLAGS[name].value != accepted)
    ]
    if given:
        sys.exit(f"{reason} Received: {', '.join(given)}. Leave that out.")


def _shown(name: str, value: Any) -> str:
    words = name.replace("_", "-")
    return f"--{'' if value else 'no'}{words}" if isinstance(value, bool) else f"--{words} {value}"
