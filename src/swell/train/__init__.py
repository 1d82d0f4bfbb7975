"""The elastic runtime inside a job; docs/runtime.md tells its story."""
