"""Errors a user can meet, each a subclass of the builtin a caller would expect."""


class ZeroError(RuntimeError):
    """Anything this package refuses or finds wrong; the message says what, where and what to do."""


class UnsupportedError(ZeroError, NotImplementedError):
    """The request is understood and not supported; the message names the nearest thing that is."""


class PlanError(ZeroError):
    """A graph or its execution departs from the plan."""


class OptionError(ZeroError, ValueError):
    """``options={...}`` holds a name or a value that is not understood."""


class GroupError(ZeroError):
    """The process group is missing, uninitialised or unfit."""


class DivergenceError(ZeroError):
    """Ranks are about to run different things."""


class SwapError(OSError, ZeroError):
    """A swap file cannot be made, or cannot hold or move a tensor; `errno` says what failed."""
