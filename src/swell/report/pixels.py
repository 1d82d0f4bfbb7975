"""Charts as pixels, for papers and slides that take no SVG.

resvg draws them with a font of its own extra: no browser, no display and no font of the machine is needed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ZOOM = 3.0
"""Pixels for each unit of a chart: 300 dots per inch if it is printed 13 cm wide."""


def pixels(drawn: str, *, system_fonts: bool = True) -> bytes:
    """A chart of `svg.figure` as a PNG. Fonts of the machine, if any, serve letters that Open Sans lacks."""
    from resvg_py import svg_to_bytes

    return bytes(
        svg_to_bytes(
            svg_string=drawn,
            zoom=ZOOM,
            sans_serif_family="Open Sans",
            font_files=_fonts(),
            skip_system_fonts=not system_fonts,
        )
    )


def _fonts() -> list[str]:
    """The font that the extra `png` installs. Without any font, resvg leaves texts out silently."""
    found = find_spec("ttf_opensans")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'ttf_opensans'", name="ttf_opensans")
    folder = Path(found.origin).parent / "ttf"
    return [str(folder / f"OpenSans-{weight}.ttf") for weight in ("Regular", "SemiBold")]
