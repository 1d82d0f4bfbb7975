"""What workers exchange: connections, shared memory, sums of gradients, states for newcomers."""
