"""How long a step takes: as long as the script is told."""

import os
import time

from tools.blocks import Blocks

WIDTH = 8
"""How wide the scripts' models are."""


class Pace:
    """Seconds to sleep for every batch, as a text; after a colon, a file whose existence ends the sleeping.

    A worker that begins when there is a file FILE.late sleeps only once it has joined the others, whose
    `seconds` it gets: so newcomers catch up as fast as they can.
    PACE_BLOCKS: a benchmark measures the batches (see `blocks`).
    """

    def __init__(self, text):
        seconds, _, self.hurry = text.partition(":")
        self.seconds = 0.0 if os.path.exists(f"{self.hurry}.late") else float(seconds)
        self.blocks = Blocks(os.environ["PACE_BLOCKS"]) if "PACE_BLOCKS" in os.environ else None

    def pause(self, share=1.0):
        """Sleep, as long as this share of a batch would take to compute."""
        if self.seconds and not (self.hurry and os.path.exists(self.hurry)):
            time.sleep(self.seconds * share)
        if self.blocks is not None:
            self.blocks.batch()
