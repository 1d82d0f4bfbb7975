"""Pictures and figures of what happened, read from event logs: live periods and simulations alike."""
