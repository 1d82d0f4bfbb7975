"""Dropout that can be turned off in a script that knows nothing of it.

A worker that tries what kind of loss a script has (`reduction`) compares losses of the same samples. Late in
training the loss is small and dropout changes it by a factor of four and more from try to try, so that these
losses say nothing. What the worker computes in a try is used for nothing else, so it leaves dropout out.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"


class Dropout:
    """A switch for the dropout of all layers, by the functions of torch that they and scripts call."""

    def __init__(self) -> None:
        self._own: dict[str, Any] = {}
        """By name: torch's functions, while dropout is off and others are in their place."""

    def set(self, *, off: bool) -> None:
        """Turn dropout off, or on again."""
        if off and not self._own:
            self._own = {name: getattr(functional, name) for name in (*_DROPOUTS, _ATTENTION)}
            for name in _DROPOUTS:
                setattr(functional, name, lambda input, *args, **options: input)
            setattr(functional, _ATTENTION, _attend(self._own[_ATTENTION]))
        elif not off:
            for name, function in self._own.items():
                setattr(functional, name, function)
            self._own = {}


def _attend(function: Any) -> Any:
    """Attention as `function` computes it, without dropout."""

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
