"""``with zero_compile.Init(): model = MyLargeModel()``: each parameter is partitioned as it is registered."""

import weakref
from collections.abc import Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zero_compile.capture.captured_graph import build_session
from zero_compile.capture.checks import refuse_parameter
from zero_compile.capture.find_model import parameter_names, refuse_wrapper
from zero_compile.config.deepspeed.convert import options_for_parameters
from zero_compile.config.deepspeed.reading import Source
from zero_compile.config.options import parse
from zero_compile.construction.init_config import (
    notice_ignored,
    one_of,
    refuse_unsupported,
    with_remote_device,
)
from zero_runtime.eager.construction import construction_of
from zero_runtime.errors import OptionError
from zero_runtime.session import Session

#: The innermost ``Init`` that is open in this thread; None also inside one that is not enabled.
_innermost: ContextVar["Init | None"] = ContextVar("zero_init", default=None)


class Init:
    """Build a model of which each rank keeps its part only. Every rank builds the same model.

    Inside, and until a graph of the model is compiled, parameters can be initialised as ever: in place,
    through ``p.data``, by ``load_state_dict``. What is done runs on the whole tensor, with the random
    stream that it would have had, so the values are those of the model built without ``Init``, bit for
    bit, if all ranks have the same seed. Reading a parameter, and changing it in place without
    overwriting it, is collective.

    Parameters that are not registered by a module's ``__setattr__`` or ``register_parameter`` are
    partitioned when the block ends; those on the meta device are left to
    :func:`zero_compile.materialize`; of nested blocks the innermost counts.

    Arguments are DeepSpeed's ``zero.Init``'s, and:

    - ``module``: partition this existing module at once.
    - ``dtype``: floating point parameters are cast to it when they are registered.
    - ``mesh``, ``options``: as for ``torch.compile(model, backend="zero3", options=...)``, which must be
      given the same later, as well as what ``remote_device`` and the config say.
    - ``config``, ``config_dict_or_path``: a DeepSpeed config, of which the sections on offloading and
      precision count.

    Raises:
        GroupError: several ranks were launched and no process group was initialised.
        OptionError: arguments that are wrong, or contradict each other.
        UnsupportedError: something that is not supported, such as quantized weights.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool | None = None,
        remote_device: str | None = None,
        pin_memory: bool | None = None,
        config_dict_or_path: Source | None = None,
        config: Source | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
        *,
        mesh: DeviceMesh | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._enabled = bool(enabled)
        self._dtype = _checked(dtype)
        self._session: Session | None = None
        self._modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._tokens: list[Token[Init | None]] = []
        if not self._enabled:
            return
        refuse_unsupported(
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
        )
        notice_ignored(
            mem_efficient_linear=mem_efficient_linear,
            param_swapper=param_swapper,
            tensor_overrides=tensor_overrides,
        )
        ranks = one_of(
            "which ranks share the model",
            data_parallel_group=data_parallel_group,
            sequence_data_parallel_group=sequence_data_parallel_group,
            mesh=mesh,
            mpu=mpu,
        )
        configs = one_of("the config", config_dict_or_path=config_dict_or_path, config=config)
        given = options_for_parameters(next(iter(configs.values()))) if configs else {}
        given = with_remote_device({**given, **(options or {})}, remote_device, pin_memory)
        self._options = parse({**_ranks(ranks, given), **given})
        if module is not None:
            self._partition(module)

    def __enter__(self) -> Self:
        if self._enabled and (self._session is None or not self._building.active):
            self._session = build_session(self._options)  # a graph ends what one session builds
        self._tokens.append(_innermost.set(self if self._enabled else None))
        if self._enabled and not self._handles:
            self._building.taking = True
            self._handles = [
                register_module_parameter_registration_hook(self._registered),
                register_module_module_registration_hook(self._joined),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _innermost.reset(self._tokens.pop())
        if self._tokens or not self._enabled:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._building.taking = False
        if kind is None:
            self._sweep()
        assert self._session is not None
        self._session.gathered_views.settle()
        self._modules.clear()

    @property
    def _building(self) -> Any:
        assert self._session is not None
        return construction_of(self._session)

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if _innermost.get() is self:
            self._modules[module] = None
            self._take(f"{type(module).__name__}.{name}", parameter)

    def _joined(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if _innermost.get() is self:
            self._modules[module] = None

    def _take(self, name: str, parameter: nn.Parameter | None) -> None:
        """Partition an ordinary parameter; others are partitioned, or have no elements, or a way of their own."""
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return
        refuse_parameter(name, parameter)
        if self._dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(self._dtype)
        self._building.take(name, parameter)

    def _sweep(self) -> None:
        """Partition what no hook has seen: parameters of copied modules, and those put in by hand."""
        inside = {child for module in self._modules for child in module.children()}
        roots = [module for module in self._modules if module not in inside]
        for root in roots:
            for name, parameter in parameter_names(root).items():
                self._take(name, parameter)
            self._building.rename(parameter_names(root))
        self._building.tidy()

    def _partition(self, module: nn.Module) -> None:
        for part in module.modules():
            refuse_wrapper(part)
        self._session = build_session(self._options)
        for name, parameter in parameter_names(module).items():
            self._take(name, parameter)
        self._session.gathered_views.settle()


def _checked(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"Init: dtype {dtype!r}: expected a floating point torch.dtype")
    return dtype


def _ranks(said: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options ``group`` or ``mesh``, of the one argument that names ranks."""
    if said and (options.get("group") is not None or options.get("mesh") is not None):
        raise OptionError(
            f"Init: {next(iter(said))} and the options name the ranks: give one of them"
        )
    if "mesh" in said:
        return dict(said)
    for name, value in said.items():
        return {"group": value.get_data_parallel_group() if name == "mpu" else value}
    return {}
