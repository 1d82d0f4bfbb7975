"""The elastic runtime inside a job; docs/how/runtime.md tells its story."""
