"""The training state: taken apart, copied, written to disk."""
