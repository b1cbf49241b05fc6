"""How the recipes read their flags, and how much they print."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from absl import flags

FlagsParser = Callable[[Sequence[str]], list[str]]


def flags_parser(
    smoke_sizes: Mapping[str, object] | None = None, values: flags.FlagValues = flags.FLAGS
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


def recipe_settings(values: flags.FlagValues = flags.FLAGS) -> dict[str, object]:
    """Return name and value of each flag of the script, those it adopted included, not absl's."""
    return {flag.name: flag.value for flag in values.get_key_flags_for_module(sys.argv[0])}


def _underscores(argument: str) -> str:
    """Return `--some-flag=any-value` as `--some_flag=any-value`."""
    return re.sub(r"^--?[a-z][\w-]*", _keep_leading_dashes, argument)


def _keep_leading_dashes(match: re.Match[str]) -> str:
    name = match[0].lstrip("-")
    return match[0][: -len(name)] + name.replace("-", "_")


def verbosity() -> int:
    """Return `verbose` for `fit`: a bar in a terminal, a line per epoch elsewhere."""
    return 1 if sys.stdout.isatty() or os.environ.get("TFSCALE_TERMINAL") else 2
