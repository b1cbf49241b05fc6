"""Commands for working on tfscale, and the emulated cluster; none of them is in the wheel."""
