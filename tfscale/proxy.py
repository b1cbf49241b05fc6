"""An optimizer that looks like the one it wraps, also when it is copied or pickled."""

from __future__ import annotations

import copy
from typing import Any

import wrapt


class OptimizerProxy(wrapt.ObjectProxy):
    """Every attribute, the class included, is the wrapped optimizer's.

    Attributes:
        _around: Defined by subclasses: wraps another optimizer in the same way.
        _fresh: Returns an optimizer with the same settings and no state, where a copy of the
            wrapped one would hold parts; otherwise None.
    """

    _around: Any
    _fresh: Any

    def from_config(self, config: dict[str, Any]) -> Any:
        """Return an optimizer made from a config, wrapped as this one.

        Args:
            config: What `get_config` of an optimizer of the same class returned.
        """
        return self._around(self.__wrapped__.from_config(config))

    def __copy__(self) -> Any:
        """Copy the wrapped optimizer and wrap it in the same way."""
        return self._around(self._fresh() or copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the wrapped optimizer and wrap it in the same way; a cycle begins anew."""
        return self._around(self._fresh() or copy.deepcopy(self.__wrapped__, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the wrapped optimizer."""
        return (self._fresh() or self.__wrapped__).__reduce_ex__(protocol)
