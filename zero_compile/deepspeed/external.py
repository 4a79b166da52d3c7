"""DeepSpeed's registration of external parameters, which nothing here needs."""

import warnings
from functools import cache

from torch import nn

from zero_runtime.errors import OptionError


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing need be registered: whoever uses a parameter gathers it, and its gradient is averaged.

    Says so in a warning, once a process.

    Raises:
        OptionError: the arguments are not a module and a parameter.
    """
    _check("register_external_parameter", module, parameter)
    _say()


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """As :func:`register_external_parameter`: there is nothing to undo.

    Raises:
        OptionError: the arguments are not a module and a parameter.
    """
    _check("unregister_external_parameter", module, parameter)
    _say()


def _check(function: str, module: object, parameter: object) -> None:
    for value, kind in ((module, nn.Module), (parameter, nn.Parameter)):
        if not isinstance(value, kind):
            raise OptionError(
                f"{function}: expected a module and a parameter, got {type(module).__name__} and "
                f"{type(parameter).__name__}"
            )


@cache
def _say() -> None:
    warnings.warn(
        "external parameters need not be registered: a module may use any parameter of the model, in the "
        "graph, across graph breaks and in code that is not compiled. These calls can be removed.",
        stacklevel=3,
    )
