"""Replicas: fixed groups of workers that share one model by torch's FSDP2 (docs/how/replicas.md)."""
