"""What a GPU is worth to a job: throughput, statistical efficiency, goodput, fitting, curves."""
