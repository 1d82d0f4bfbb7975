"""The control plane: store, scheduling loop, reconciler, promises."""
