"""The value of a GPU to a job: throughput, statistical efficiency, goodput, fitting, curves."""
