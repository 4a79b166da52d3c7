"""``materialize``: a model on the meta device gets its values, each rank its part of them."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_compile.capture.captured_graph import build_session
from zero_compile.capture.checks import refuse_parameter
from zero_compile.capture.find_model import parameter_names, refuse_wrapper
from zero_compile.config.options import parse
from zero_compile.construction.safetensors import Stored, tensors_at
from zero_runtime.eager.construction import construction_of
from zero_runtime.errors import OptionError, UnsupportedError, ZeroError
from zero_runtime.ir.strides import lies_as
from zero_runtime.session import Session, session_of


class Keys(NamedTuple):
    """As ``load_state_dict`` returns them: names of the model that the checkpoint lacks, and the reverse."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Held(NamedTuple):
    """A parameter or a buffer of a module. ``persistent``: it belongs to ``state_dict()``."""

    name: str
    module: nn.Module
    key: str
    persistent: bool

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.module, self.key)
        return found

    @property
    def is_parameter(self) -> bool:
        return self.key in self.module._parameters


def materialize(
    model: nn.Module,
    init: Callable[[nn.Module], object] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
) -> Keys:
    """Give the parameters and buffers of ``model`` that are on the meta device memory and values.

    No rank ever holds more of the parameters than its part and one of them whole. Parameters on the meta
    device are replaced by others, tied ones by one, so make optimizers afterwards; those that have values
    are partitioned as they are.

    Without a ``checkpoint`` each module, its children first, is given to ``init``, or where that is None
    initialises itself by its ``reset_parameters()``. With one (a safetensors file, the index of several, or
    a folder with either) each rank reads its own elements, cast to the parameter's dtype; only modules
    with something that the checkpoint lacks are initialised, before. Then ``strict`` is as for
    ``load_state_dict``: a name that is missing or unexpected is an error. ``device`` is where the model
    lives; None: torch's default device. ``options`` are those of the later ``torch.compile``.

    Call it on every rank, with the same random seed. Until a graph is compiled parameters can be changed,
    as with :class:`zero_compile.Init`.

    Raises:
        GroupError: several ranks were launched and no process group was initialised.
        OptionError: there is no such checkpoint, or an argument is of the wrong kind.
        UnsupportedError: a parameter cannot be partitioned, or a graph of the model exists already.
        ZeroError: names or shapes do not fit, or something was neither initialised nor loaded.
    """
    if init is not None and not callable(init):
        raise OptionError(f"init: expected a function of a module, got {init!r}")
    for module in model.modules():
        refuse_wrapper(module)
    stored = {} if checkpoint is None else tensors_at(checkpoint)
    held = list(_held(model))
    keys = _compared(model, held, stored, strict) if checkpoint is not None else Keys([], [])
    session = _session_of(model, options)
    there = torch.device(device) if device is not None else torch.get_default_device()
    with torch.no_grad():
        fresh = _give_memory(session, held, there)
        _initialise(model, held, fresh, init, stored)
        session.gathered_views.settle()
        loaded = {_load(session, each, stored) for each in _sources(held, stored)}
        _refuse_empty(session, held, fresh, loaded)
    construction_of(session).rename(parameter_names(model))
    return keys


def _held(model: nn.Module) -> Iterator[_Held]:
    """Every place at which a module holds a parameter or a buffer; tied ones come several times."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                persistent = key not in module._non_persistent_buffers_set
                yield _Held(prefix + key, module, key, persistent)


def _session_of(model: nn.Module, options: Mapping[str, Any] | None) -> Session:
    known = {s for p in model.parameters() if (s := session_of(p)) is not None}
    if not all(construction_of(session).active for session in known):
        raise UnsupportedError(
            "a graph of this model was compiled already: materialise it before its first forward"
        )
    return build_session(parse(options)) if not known else known.pop()


# ------------------------------------------------------------------------------ names


def _compared(
    model: nn.Module, held: list[_Held], stored: Mapping[str, Stored], strict: bool
) -> Keys:
    """Names that do not meet. Nothing is changed.

    Raises:
        ZeroError: ``strict``, and there are some; or shapes differ.
    """
    names = {each.name for each in held if each.persistent}
    covered = {id(each.tensor) for each in held if each.name in stored}
    missing = [
        each.name
        for each in _first_of_tied(held)
        if each.persistent and id(each.tensor) not in covered
    ]
    keys = Keys(missing, [name for name in stored if name not in names])
    problems = [*_unmet(keys)] if strict else []
    problems += [
        f"size mismatch for {each.name}: the checkpoint has shape {list(stored[each.name].shape)}, the "
        f"model {list(each.tensor.shape)}."
        for each in held
        if each.name in stored and stored[each.name].shape != tuple(each.tensor.shape)
    ]
    if problems:
        lines = "\n\t".join(problems)
        raise ZeroError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{lines}")
    return keys


def _unmet(keys: Keys) -> Iterator[str]:
    for what, names in (("Missing", keys.missing_keys), ("Unexpected", keys.unexpected_keys)):
        if names:
            quoted = ", ".join(f'"{name}"' for name in names)
            yield f"{what} key(s) in state_dict: {quoted}."


def _first_of_tied(held: list[_Held]) -> list[_Held]:
    first: dict[int, _Held] = {}
    for each in held:
        first.setdefault(id(each.tensor), each)
    return list(first.values())


def _sources(held: list[_Held], stored: Mapping[str, Stored]) -> list[_Held]:
    """Where each tensor is loaded from: of tied names the last one counts, as for ``load_state_dict``."""
    last = {id(each.tensor): each for each in held if each.persistent and each.name in stored}
    return list(last.values())


# ------------------------------------------------------------------------------ memory


class _Fresh:
    """Buffers that were given memory and, as far as their version counters show, no values yet."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}

    def add(self, buffer: torch.Tensor) -> None:
        """``buffer`` is empty."""
        self._versions[id(buffer)] = buffer, buffer._version  # kept alive: its id stays its own

    def __contains__(self, buffer: torch.Tensor) -> bool:
        known, version = self._versions.get(id(buffer), (None, 0))
        return known is buffer and version == buffer._version


def _give_memory(session: Session, held: list[_Held], device: torch.device) -> _Fresh:
    """Replace what is on the meta device, and partition the parameters. Returns the new buffers."""
    fresh = _Fresh()
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for each in held:
        tensor = each.tensor
        if id(tensor) in replaced:
            setattr(each.module, each.key, replaced[id(tensor)][1])
        elif tensor.is_meta:
            new = _empty(session, each, device)
            replaced[id(tensor)] = tensor, new  # kept alive: its id stays its own
            setattr(each.module, each.key, new)
            if not each.is_parameter:
                fresh.add(new)
        elif type(tensor) is nn.Parameter:
            refuse_parameter(each.name, tensor)
            construction_of(session).take(each.name, tensor)
    return fresh


def _empty(session: Session, held: _Held, device: torch.device) -> torch.Tensor:
    """Memory for a tensor on the meta device; for a parameter it is this rank's part."""
    old = held.tensor
    memory = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
    if not held.is_parameter:
        return memory
    if type(old) is not nn.Parameter:
        raise UnsupportedError(
            f"{held.name} is a {type(old).__name__} on the meta device: only ordinary parameters can be "
            "materialised"
        )
    new = nn.Parameter(memory, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    construction_of(session).take(held.name, new, blank=True)
    return new


# ------------------------------------------------------------------------------ values


def _initialise(
    model: nn.Module,
    held: list[_Held],
    fresh: _Fresh,
    init: Callable[[nn.Module], object] | None,
    stored: Mapping[str, Stored],
) -> None:
    """Modules with something that is empty and stays so otherwise, children first.

    A tied parameter is initialised by the first module that has it, as if it was tied after that.
    """
    loaded = {id(each.tensor) for each in _sources(held, stored)}
    own: dict[nn.Module, list[_Held]] = {}
    for each in held:
        if id(each.tensor) not in loaded:
            own.setdefault(each.module, []).append(each)
    for module in _children_first(model):
        needy = any(_blank(each) or each.tensor in fresh for each in own.get(module, ()))
        if init is not None and (needy or not stored):
            init(module)
        elif init is None and needy:
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if callable(reset):
                reset()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()

    def visit(part: nn.Module) -> Iterator[nn.Module]:
        if part not in seen:
            seen.add(part)
            for child in part.children():
                yield from visit(child)
            yield part

    return visit(module)


def _blank(held: _Held) -> bool:
    """Whether the parameter was given memory and no value."""
    tensor = held.tensor
    session = session_of(tensor)
    if session is None or not isinstance(tensor, nn.Parameter):
        return False
    return construction_of(session).is_blank(session.entry(tensor))


def _load(session: Session, held: _Held, stored: Mapping[str, Stored]) -> int:
    """Read one tensor; this rank's elements, of a parameter. Returns its ``id``."""
    source, tensor = stored[held.name], held.tensor
    if not isinstance(tensor, nn.Parameter) or session_of(tensor) is None:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        source.read_into(whole.view(-1))
        tensor.copy_(whole)
    elif _row_major(tensor):
        construction_of(session).fill(session.entry(tensor), source.read_into, source.digest())
    else:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        source.read_into(whole.view(-1))
        tensor.copy_(whole)
        session.gathered_views.settle()
    return id(tensor)


def _row_major(tensor: torch.Tensor) -> bool:
    meta = torch.empty(tensor.shape, device="meta")
    return lies_as(meta, tensor.stride())


def _refuse_empty(session: Session, held: list[_Held], fresh: _Fresh, loaded: set[int]) -> None:
    session.gathered_views.settle()
    empty = [
        each.name
        for each in held
        if each.tensor.numel()
        and id(each.tensor) not in loaded
        and (_blank(each) or each.tensor in fresh)
    ]
    if empty:
        raise ZeroError(
            f"{', '.join(empty)}: neither initialised nor loaded. Their modules have no reset_parameters() "
            "that writes them, or init does not: pass an init(module) that does."
        )
