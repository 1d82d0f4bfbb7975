"""Everything that a cluster shared by teams, services and sweeps must show, as one benchmark."""
