"""Dropout that can be turned off in a script that knows nothing of it.

A worker that tries what kind of loss a script has (`reduction`) compares losses of the same samples. Late in
training the loss is small and dropout changes it by a factor of four and more from try to try, so nothing
could be seen. What this worker computes in a try counts for nothing else, so it computes without dropout.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"


class Dropout:
    """torch's functions for dropout, which layers and scripts call."""

    def __init__(self) -> None:
        self._own: dict[str, Any] = {}
        """By name: torch's functions, while others are in their place."""

    def set(self, *, off: bool) -> None:
        """Turn dropout off, or on again."""
        if off == bool(self._own):
            return
        if off:
            self._own = {name: getattr(functional, name) for name in (*_DROPOUTS, _ATTENTION)}
        for name, function in self._own.items():
            replaced = _attend if name == _ATTENTION else _keep
            setattr(functional, name, replaced(function) if off else function)
        if not off:
            self._own = {}


def _keep(_function: Any) -> Any:
    return lambda input, *args, **options: input


def _attend(function: Any) -> Any:
    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **others: Any,
    ) -> Any:
        return function(query, key, value, attn_mask, 0.0, *args, **others)

    return attend
