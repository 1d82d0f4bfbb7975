"""A moving picture of the demo, for the first page: the lanes of a real run. `make pictures` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from swell.api.client import Client
from swell.cli import demo
from swell.domain import Event, EventKind
from swell.report.page import moving
from swell.report.runs import Run

OUT = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "demo.svg"


class Recorded(demo.Demo):
    """The demo; before it is cleaned up, its event log becomes a picture."""

    def clean_up(self) -> None:
        """Draw, then clean up."""
        try:
            with Client(home=self.home, role="admin") as client:
                events = [
                    Event(one.time_s, EventKind(one.kind), job_id=one.job_id, node=one.node, data=one.data)
                    for one in client.events(since=0, follow=False)
                ]
            OUT.write_text(moving(Run.read("swell demo", events)) + "\n")
        finally:
            super().clean_up()


if __name__ == "__main__":
    sys.exit(demo.run(False, Recorded))
