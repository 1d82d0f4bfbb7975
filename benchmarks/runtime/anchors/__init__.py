"""Anchors: what other systems need when a worker dies or joins, measured in the same run as swell.

Each system trains the small model of `benchmarks.runtime.overhead_script` on one host with three workers
of one thread. Its script writes a row for each step (`rows`), and from these rows come the figures:

- *death*: a worker is killed with -9, and the pause lasts until training goes on.
- *join*: a third worker comes to two that train.

A pause is the longest gap between two steps from the moment of the request to the first step of the new
membership, minus a normal step. torchrun and Ray Train restart all workers from a checkpoint, which the
scripts save every 50 steps, and so they also repeat steps. torchft keeps the survivors' processes. It is
the only one with a step of its own, which is compared with DDP's; the others use DDP as it is.
"""
