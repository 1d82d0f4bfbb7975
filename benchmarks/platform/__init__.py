"""Benchmarks of the platform: crashes, promises."""
