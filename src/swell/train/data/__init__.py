"""Which samples each worker gets, and how they are read."""
