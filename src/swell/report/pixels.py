"""Charts as pixels, for papers and slides that take no SVG. Drawn by resvg: no browser and no display."""

from __future__ import annotations

from functools import cache

from swell.domain import SwellError

ZOOM = 3.0
"""Pixels for each unit of a chart: 300 dots per inch if it is printed 13 cm wide."""


def pixels(drawn: str) -> bytes:
    """A chart of `svg.figure` as a PNG."""
    from resvg_py import svg_to_bytes

    if not _has_fonts():
        raise SwellError(
            "PNG needs a font, and this machine has none: install one, such as the package fonts-dejavu, or"
            " use --format svg"
        )
    return bytes(svg_to_bytes(svg_string=drawn, zoom=ZOOM, sans_serif_family="DejaVu Sans"))


@cache
def _has_fonts() -> bool:
    """Whether text leaves a trace: without any font it is silently left out."""
    from resvg_py import svg_to_bytes

    head = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20">'
    empty, written = (
        svg_to_bytes(svg_string=f'{head}<text y="15" font-family="sans-serif">{text}</text></svg>')
        for text in (" ", "swell")
    )
    return bytes(empty) != bytes(written)
