"""The runtime's figures, anchors beside them: `python -m benchmarks.runtime` writes one JSON."""
