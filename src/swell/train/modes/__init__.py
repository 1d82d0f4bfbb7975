"""Adaptive batches and logical ranks (consistent mode)."""
