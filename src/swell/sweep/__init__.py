"""Sweeps: many trials of one script with other hyper-parameters, as elastic jobs of the platform."""
