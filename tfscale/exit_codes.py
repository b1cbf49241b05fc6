"""Exit codes of training processes that say more than success (0) and failure (1)."""

from __future__ import annotations

PREEMPTED = 75
"""A checkpoint was written on request (SIGTERM): start the job again to go on.

EX_TEMPFAIL of sysexits.h, "the user is invited to try again later"; schedulers can requeue on it.
"""
