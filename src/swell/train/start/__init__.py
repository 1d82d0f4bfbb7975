"""How a worker's process begins: forked from a prepared one (zygote), then into the script (bootstrap)."""
