"""Every figure in the README and the docs is printed by a script here."""
