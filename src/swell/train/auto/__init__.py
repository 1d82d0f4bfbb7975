"""Unmodified scripts as elastic jobs."""
