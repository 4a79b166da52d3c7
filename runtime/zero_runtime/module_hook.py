"""Hooks on the user's modules that stay behind when a module is copied or pickled."""

from collections.abc import Callable
from typing import Any

from zero_runtime import compat


class ModuleHook:
    """Calls ``function`` outside of compiled graphs. A copy of the module gets a hook that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @compat.outside_dynamo
    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _left_behind, ()


def _left_behind() -> Callable[..., None]:
    return nothing


def nothing(*args: Any) -> None:
    """The hook of a copy."""
