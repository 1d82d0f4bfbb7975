"""The coordinator's side of jobs whose members are replicas: fixed groups of workers that share one model."""
