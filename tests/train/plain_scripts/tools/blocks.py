"""Batches in blocks, each begun when a benchmark says so: it measures two processes in turns."""

import os
import socket
import sys
import time

import torch

_SIDE = 256


class Blocks:
    """PACE_BLOCKS=FIRST,SIZE,TIMES,SOCKET: from batch FIRST on, blocks of SIZE batches.

    Besides what the script computes, every batch multiplies two matrices TIMES times. Before a block it waits
    for a word: `go` has it run and tell the seconds of the processor that it took, `count` the calls of
    swell's functions in it. When the connection ends the script runs on by itself.
    """

    def __init__(self, text):
        first, size, times, path = text.split(",")
        self.factor, self.product = torch.eye(_SIDE), torch.eye(_SIDE)
        self.first, self.size, self.times, self.step = int(first), int(size), int(times), 0
        self.word, self.begin_s, self.calls = "", 0.0, 0
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(path)

    def batch(self):
        """A batch: called at the same place of the script's loop each time."""
        for _ in range(self.times):
            torch.mm(self.factor, self.factor, out=self.product)
        self.step += 1
        if self.step < self.first or (self.step - self.first) % self.size:
            return
        cpu_s = time.process_time() - self.begin_s
        sys.setprofile(None)
        if self.word:
            self.connection.sendall(b"%.6f\n" % (self.calls if self.word == "count" else cpu_s))
        self.word = self.connection.recv(16).decode()
        self.calls = 0
        if self.word == "count":
            sys.setprofile(self.count)
        self.begin_s = time.process_time()

    def count(self, frame, event, argument):
        """A call, or the end of one."""
        name = frame.f_code.co_filename
        self.calls += event == "call" and f"{os.sep}swell{os.sep}train{os.sep}" in name
