"""Command line of the recipes: reading flags, refusing those without effect, verbosity."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

FLAGS = flags.FLAGS
FlagsParser = Callable[[Sequence[str]], list[str]]


def flags_parser(
    smoke_sizes: Mapping[str, object] | None = None, values: flags.FlagValues = FLAGS
) -> FlagsParser:
    """Return what `app.run(main, flags_parser=...)` calls to read the command line.

    It takes `--batch-size` as well as absl's `--batch_size`, and under `--smoke` gives the
    flags named in `smoke_sizes` those values, save where the command line says otherwise.

    Args:
        smoke_sizes: Flag name and value: a size that runs in under a minute on two cores; None
            where there is no `--smoke`.
        values: Where the flags are defined.

    Returns:
        A function from argv to the arguments that are not flags. On a wrong flag it says so and
        exits with status 1.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            rest = values([argv[0], *(_underscores(arg) for arg in argv[1:])])
        except flags.Error as error:
            sys.exit(f"{error}\nPass --helpshort to see the flags of this recipe.")
        if smoke_sizes and values["smoke"].value:
            for name, value in smoke_sizes.items():
                if not values[name].present:
                    values[name].value = value
        return rest

    return parse


def recipe_settings(values: flags.FlagValues = FLAGS) -> dict[str, object]:
    """Return name and value of each flag of the script, those it adopted included, not absl's."""
    return {flag.name: flag.value for flag in values.get_key_flags_for_module(sys.argv[0])}


def _underscores(argument: str) -> str:
    """Return `--some-flag=any-value` as `--some_flag=any-value`."""
    return re.sub(r"^--?[a-z][\w-]*", _keep_leading_dashes, argument)


def _keep_leading_dashes(match: re.Match[str]) -> str:
    name = match[0].lstrip("-")
    return match[0][: -len(name)] + name.replace("-", "_")


def check_flags() -> None:
    """Refuse flags of the command line that would change nothing.

    A default that has no effect is no error; `run.json` has what happened.

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
        none: dict[str, Any] = {"exchange": None, "groups": 1, "interval": None}
        none |= {"local_start": "immediately", "local_average": "parameters", "outer": ""}
        none |= {"compression": "none"}
        refuse(reason, none)
    else:
        refuse("--distance-weights needs --average-every.", {"distance_weights": 0.0})
    if FLAGS.exchange == "horovod":
        reason = "Under --exchange horovod ranks average gradients, in float32."
        refuse(reason, {"groups": 1, "compression": "none"})
    if FLAGS.groups == 1:
        refuse("--overlap needs --groups.", {"overlap": 0})
        refuse("--local-average needs --groups.", {"local_average": "parameters"})
        refuse("--outer needs --groups.", {"outer": ""})
        refuse("--local-start needs --groups.", {"local_start": "immediately"})
    if not FLAGS.theta_every:
        refuse("--theta-norms needs --theta-every.", {"theta_norms": False})
    if not FLAGS.adaptive_batch:
        refuse("--adaptive-interval needs --adaptive-batch.", {"adaptive_interval": 0})
        refuse("--adaptive-rule needs --adaptive-batch.", {"adaptive_rule": "robust"})
        refuse("--adaptive-signal needs --adaptive-batch.", {"adaptive_signal": "theta"})
        refuse("--adaptive-decay needs --adaptive-batch.", {"adaptive_decay": 0.1})
        refuse("--adaptive-ranks needs --adaptive-batch.", {"adaptive_ranks": "all"})


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


def verbosity() -> int:
    """Return `verbose` for `fit`: a bar in a terminal, a line per epoch elsewhere."""
    return 1 if sys.stdout.isatty() or os.environ.get("TFSCALE_TERMINAL") else 2
