"""Experiment trackers: one continuous run per job, written by a process beside the job's launcher."""
