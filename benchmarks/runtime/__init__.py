"""The runtime's must-show figures: `python -m benchmarks.runtime` writes one JSON with anchors beside them."""
