"""An emulated cluster on one machine: a network namespace per node, links with a rate.

`layout` names things, `commands` says what would be done, `state` remembers what exists, `control`
does it, `running` runs programs there. Linux and root only; the rest of tfscale does not need it.
"""
