"""Ranks that ask each other before a step, where nobody would tell a waiting one."""

from __future__ import annotations

from typing import Literal

from tfscale.comm import runtime
from tfscale.comm.eager import Header, exchange_headers
from tfscale.config import ExchangeError

Answer = Literal["run", "end", "stop"]
_KIND = "step of fit"


def ask(own: Answer, step: int) -> set[Answer]:
    """Tell all ranks what this one does next, and return what they do.

    Collective. A step that is not traced, or that a backend without marks exchanges, cannot be
    given up once it has begun: so all ranks begin it or none.

    Args:
        own: "run" before a step, "end" at the end of an epoch, "stop" where training ends early.
        step: Steps of this epoch, the asked one included.

    Returns:
        The answers of all ranks. "run" comes with "stop" (then nobody runs), never with "end".

    Raises:
        ExchangeError: Some ranks begin a step and others have no data for it, all have ended
            their epoch after unequal steps, or a rank calls another collective; on every rank.
    """
    headers = exchange_headers(Header(_KIND, [own, step], [], [], "fit"), runtime.world())
    for rank, other in enumerate(headers):
        if other.kind != _KIND:
            raise ExchangeError(
                "All ranks must call the same collectives in the same order. Received: rank "
                f"{rank} calls {other.describe()} while rank {runtime.rank()} is in fit, step "
                f"{step}. Give fit the same callbacks on all ranks."
            )
    answers: set[Answer] = {header.options[0] for header in headers}
    ended = {r: h.options[1] for r, h in enumerate(headers) if h.options[0] == "end"}
    # Where steps may exchange nothing, ranks learn of unequal epochs when all have ended theirs.
    is_uneven = answers == {"end"} and len(set(ended.values())) > 1
    if is_uneven or {"run", "end"} <= answers:
        rank = min(ended, key=lambda r: ended[r])
        raise ExchangeError(
            f"All ranks must have as many batches. Received: rank {rank} ended its epoch after "
            f"step {ended[rank]}, and others have more. Give every rank as many batches, for "
            "example with tfscale.data.GlobalBatches."
        )
    return answers
