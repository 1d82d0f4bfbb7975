"""How long a step takes: as long as the script is told, and how long that was."""

import json
import os
import time

WIDTH = int(os.environ.get("PLAIN_WIDTH", "8"))
"""How wide the scripts' models are: 8 in tests, more where the time of a step is measured."""


class Pace:
    """Seconds to sleep for every batch, as a text; after a colon, a file whose existence ends the sleeping.

    A worker that begins when there is a file FILE.late sleeps only once it has joined the others, whose
    `seconds` it gets: so newcomers catch up as fast as they can.
    PACE_REPORT=FIRST,LAST,FILE: how much time of the processor and of the clock passed between those steps.
    """

    def __init__(self, text):
        seconds, _, self.hurry = text.partition(":")
        self.seconds = 0.0 if os.path.exists(f"{self.hurry}.late") else float(seconds)
        self.step, self.begin = 0, None
        first, last, self.report = os.environ.get("PACE_REPORT", "0,0,").split(",")
        self.first, self.last = int(first), int(last)

    def pause(self, share=1.0):
        """Sleep, as long as this share of a batch would take to compute."""
        if self.seconds and not (self.hurry and os.path.exists(self.hurry)):
            time.sleep(self.seconds * share)
        self.step += 1
        if self.step == self.first:
            self.begin = time.process_time(), time.perf_counter()
        if self.step == self.last:
            cpu_s, wall_s = time.process_time() - self.begin[0], time.perf_counter() - self.begin[1]
            with open(self.report, "w") as file:
                json.dump({"cpu_s": cpu_s, "wall_s": wall_s}, file)
