"""Drawings of the exchanges for docs/exchanges.md: which rank sends what, and when.

    python -m tools.draw_exchanges

writes `docs/exchange-*.svg`. Times are not to scale. Every drawing has a background of its own, so
that it can be read on light and on dark pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs"

_LEFT, _UNIT, _LANE, _BLOCK, _TOP = 124, 64, 44, 26, 46
# Fill and border of what a lane shows.
_COLORS = {
    "forward": ("#dbe9ff", "#4878c8"),
    "backward": ("#ffe3c2", "#c27a1c"),
    "update": ("#d9f2dc", "#3c8f4a"),
    "message": ("#e9defa", "#7a52b8"),
    "wait": ("#ffffff", "#9a9a9a"),
}


@dataclasses.dataclass(frozen=True)
class Block:
    """Something that takes time in one lane, from `start` to `end` in units of time."""

    start: float
    end: float
    text: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Lane:
    """One row of a drawing: what a rank computes, or what its link carries."""

    label: str
    blocks: Sequence[Block]


@dataclasses.dataclass(frozen=True)
class Arrow:
    """Ranks that exchange something: both lanes send and receive at this time."""

    time: float
    first: int
    second: int


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A drawing of one exchange, with a title above and a remark below."""

    name: str
    title: str
    lanes: Sequence[Lane]
    arrows: Sequence[Arrow]
    remark: str


def svg(drawing: Drawing) -> str:
    """Return the drawing as the text of an SVG file."""
    end = max(block.end for lane in drawing.lanes for block in lane.blocks)
    width = round(_LEFT + end * _UNIT + 20)
    height = _TOP + _LANE * len(drawing.lanes) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="sans-serif" font-size="12">',
        f"<title>{escape(drawing.title)}</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#7a52b8"/>'
        "</marker></defs>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#fcfcfd" stroke="#d5d5dc"/>',
        _text(14, 24, drawing.title, weight="bold", size=14),
    ]
    for number, lane in enumerate(drawing.lanes):
        y = _TOP + number * _LANE
        parts.append(_text(14, y + 18, lane.label))
        parts.append(
            f'<line x1="{_LEFT}" y1="{y + 35}" x2="{width - 14}" y2="{y + 35}" stroke="#ececf0"/>'
        )
        parts += [_box(block, y) for block in lane.blocks]
    parts += [_double_arrow(arrow) for arrow in drawing.arrows]
    parts.append(_text(14, height - 14, drawing.remark, color="#4a4a55"))
    return "\n".join([*parts, "</svg>", ""])


def _box(block: Block, y: float) -> str:
    x, wide = _LEFT + block.start * _UNIT, (block.end - block.start) * _UNIT - 3
    fill, border = _COLORS[block.kind]
    dash = ' stroke-dasharray="4 3"' if block.kind == "wait" else ""
    return (
        f'<rect x="{x:.0f}" y="{y}" width="{wide:.0f}" height="{_BLOCK}" rx="3" fill="{fill}" '
        f'stroke="{border}"{dash}/>' + _text(x + wide / 2, y + 17, block.text, anchor="middle")
    )


def _double_arrow(arrow: Arrow) -> str:
    x = _LEFT + arrow.time * _UNIT
    first, second = (_TOP + lane * _LANE for lane in sorted((arrow.first, arrow.second)))
    return (
        f'<line x1="{x:.0f}" y1="{first + _BLOCK}" x2="{x:.0f}" y2="{second}" stroke="#7a52b8" '
        'stroke-width="1.4" marker-start="url(#head)" marker-end="url(#head)"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    size: int = 12,
    color: str = "#1c1c22",
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}" fill="{color}">{escape(text)}</text>'
    )


def _forward(start: float, names: Sequence[str] = ("1", "2", "3")) -> list[Block]:
    return [Block(start + i, start + i + 1, f"F {n}", "forward") for i, n in enumerate(names)]


def _backward(start: float, names: Sequence[str] = ("3", "2", "1")) -> list[Block]:
    return [
        Block(start + 1.4 * i, start + 1.4 * (i + 1), f"B {n}", "backward")
        for i, n in enumerate(names)
    ]


def _message(start: float, end: float, text: str) -> Block:
    return Block(start, end, text, "message")


def _on_two_ranks(compute: Sequence[Block], link: Sequence[Block]) -> list[Lane]:
    """Return the lanes of two ranks that compute and send the same; their links are adjacent."""
    return [
        Lane("rank 0 computes", compute),
        Lane("rank 0 sends", link),
        Lane("rank 1 sends", link),
        Lane("rank 1 computes", compute),
    ]


def _middles(blocks: Sequence[Block], first: int = 1, second: int = 2) -> list[Arrow]:
    return [Arrow((b.start + b.end) / 2, first, second) for b in blocks if b.kind == "message"]


def allreduce() -> Drawing:
    """Draw gradients that are summed in buckets during back-propagation."""
    link = [
        _message(4.4, 6.0, "sum of 3"),
        _message(6.0, 7.4, "sum of 2"),
        _message(7.4, 8.8, "sum of 1"),
    ]
    compute = [
        *_forward(0),
        *_backward(3),
        Block(7.2, 8.8, "waits", "wait"),
        Block(8.8, 10.2, "update", "update"),
    ]
    return Drawing(
        "allreduce",
        'Allreduce, "allreduce"',
        _on_two_ranks(compute, link),
        _middles(link),
        "F, B: forward pass and back-propagation of layers 1 to 3. A bucket is summed as soon as "
        "its gradients exist.",
    )


def chunked() -> Drawing:
    """Draw two chunks of gradients, and a dense layer that sends activations instead."""
    link = [
        _message(2, 3.4, "inputs of fc"),
        _message(4.4, 5.8, "out. grad. fc"),
        _message(5.8, 7.4, "chunk 1 (2)"),
        _message(7.4, 9.0, "chunk 2 (1)"),
    ]
    compute = [
        *_forward(0, ("1", "2", "fc")),
        *_backward(3, ("fc", "2", "1")),
        Block(7.2, 8.4, "grad. fc", "backward"),
        Block(8.4, 9.4, "upd. fc 2", "update"),
        Block(9.4, 10.4, "upd. 1", "update"),
    ]
    return Drawing(
        "chunked",
        'Chunked, "chunked": two messages, and a replicated dense layer',
        _on_two_ranks(compute, link),
        _middles(link),
        "fc: inputs and output gradients (out. grad.) are gathered, and each rank computes the "
        "gradient of the whole batch.",
    )


def sharded() -> Drawing:
    """Draw segments of gradients that go to their owners, and parameters that come back."""
    link = [
        _message(2.9, 4.3, "parts of 3"),
        _message(4.3, 5.7, "parts of 2"),
        _message(5.7, 7.1, "parts of 1"),
        _message(7.7, 8.7, "new 1"),
        _message(8.7, 9.7, "new 2"),
        _message(9.7, 10.7, "new 3"),
    ]
    compute = [
        Block(0, 1.5, "F 1 to 3", "forward"),
        *_backward(1.5),
        Block(5.7, 7.7, "update own half", "update"),
        Block(8.7, 9.7, "F 1", "forward"),
        Block(9.7, 10.7, "F 2", "forward"),
        Block(10.7, 11.7, "F 3", "forward"),
    ]
    lanes = _on_two_ranks(compute, link)
    return Drawing(
        "sharded",
        'Sharded, "sharded": each rank owns a part of every layer',
        lanes,
        _middles(link),
        "A rank receives the gradients of its part, updates it, and sends the new values while "
        "the next forward pass runs.",
    )


def local_sgd() -> Drawing:
    """Draw two groups of two ranks that average each rank's segment."""
    lanes = []
    for rank in range(4):
        steps = [Block(2 * i, 2 * i + 1.5, f"step {i + 1}", "backward") for i in range(4)]
        own = _message(7.5, 9.5, f"average of {'AB'[rank % 2]}")
        following = Block(9.9, 11.4, "step 5", "backward")
        lanes.append(Lane(f"group {rank // 2}, rank {rank}", [*steps, own, following]))
    inside = [Arrow(t, first, first + 1) for t in (1.75, 3.75, 5.75, 7.35, 9.7) for first in (0, 2)]
    return Drawing(
        "local-sgd",
        "LocalSGD: 2 groups of 2 ranks, interval 4, within=Sharded()",
        lanes,
        [*inside, Arrow(7.7, 0, 2), Arrow(9.25, 1, 3)],
        "Each step exchanges within the group. Every 4 steps the ranks that own half A average it, "
        "and so do those of half B.",
    )


def auto() -> Drawing:
    """Draw the first steps of a fit, and what each layer then does."""
    return Drawing(
        "auto",
        'Auto, "auto": an exchange for each parameter',
        [
            Lane(
                "steps of fit",
                [
                    Block(0, 2.4, "times of layers", "backward"),
                    Block(2.4, 4.2, "plan (once)", "update"),
                    Block(4.2, 7.2, "best plans are timed", "backward"),
                    Block(7.2, 11.4, "the fastest, to the end", "forward"),
                ],
            ),
            Lane("small layers", [_message(7.2, 11.4, "allreduce, together")]),
            Lane("large layers", [_message(7.2, 11.4, "parts to owners, new values back")]),
            Lane("dense layers", [_message(7.2, 11.4, "inputs and output gradients")]),
        ],
        [],
        "The same plan on all ranks. Plain allreduce is among what is timed, and remains where "
        "nothing is faster.",
    )


def parameter_averaging() -> Drawing:
    """Draw ranks that train alone and average after each epoch."""
    blocks = [
        Block(0, 4, "epoch 1, alone", "backward"),
        _message(4, 5.4, "average"),
        Block(5.4, 9.4, "epoch 2, alone", "backward"),
        _message(9.4, 10.8, "average"),
    ]
    return Drawing(
        "averaging",
        "ParameterAveraging(1): no exchange of gradients",
        [Lane("rank 0", blocks), Lane("rank 1", blocks)],
        _middles(blocks, 0, 1),
        "Models differ between averages; validation sees the average.",
    )


DRAWINGS = (allreduce, chunked, sharded, local_sgd, auto, parameter_averaging)


def main() -> None:
    """Write all drawings."""
    for draw in DRAWINGS:
        drawing = draw()
        path = FOLDER / f"exchange-{drawing.name}.svg"
        path.write_text(svg(drawing), encoding="utf-8")


if __name__ == "__main__":
    main()
