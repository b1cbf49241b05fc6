"""Drawings of exchanges: the committed files are those of the script, and texts fit."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools import draw_exchanges

PAGE = Path(__file__).resolve().parents[2] / "docs/exchanges.md"
PIXELS_PER_LETTER = 6.6  # of 12 pixels, sans-serif


@pytest.mark.parametrize("draw", draw_exchanges.DRAWINGS, ids=lambda draw: draw.__name__)
def test_drawings_are_committed_and_their_texts_fit(draw):
    drawing = draw()
    text = draw_exchanges.svg(drawing)
    name = f"exchange-{drawing.name}.svg"
    assert (draw_exchanges.FOLDER / name).read_text(encoding="utf-8") == text
    assert f"]({name})" in PAGE.read_text(encoding="utf-8")
    width = float(ET.fromstring(text).attrib["width"])
    assert PIXELS_PER_LETTER * len(drawing.remark) < width - 28
    for lane in drawing.lanes:
        for block in lane.blocks:
            wide = (block.end - block.start) * draw_exchanges._UNIT - 3
            assert PIXELS_PER_LETTER * len(block.text) <= wide, block
        ends = [block.end for block in lane.blocks]
        assert all(b.start >= end for b, end in zip(lane.blocks[1:], ends, strict=False)), lane
