"""A job's processes and who belongs to it: launcher, coordinator, membership, messages. No torch here."""
