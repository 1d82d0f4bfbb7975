"""swell on a Ray cluster of several nodes on this machine."""
