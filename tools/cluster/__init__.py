"""An emulated cluster on one machine: a network namespace per node, links with a rate.

`layout` names things, `commands` says what would be done, `state` remembers what exists, `control`
does it, `running` runs programs there, `python -m tools.cluster` is the command. Linux and root
only.
"""
