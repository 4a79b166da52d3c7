"""Which modules of a model are leaves: gathered whole, whatever a rank uses of them."""

from collections.abc import Iterable, Iterator

from torch import nn

from zero_runtime import compat
from zero_runtime.eager.leaf_module import Leaf
from zero_runtime.errors import OptionError
from zero_runtime.session import Session


def find_leaves(root: nn.Module, chosen: Iterable[type | str]) -> list[tuple[str, nn.Module]]:
    """The modules that ``chosen`` names, with their names. Nothing is changed.

    Raises:
        OptionError: a name or class that no module of ``root`` answers to.
    """
    given = compat.compiled_module(root)
    root = root if given is None else given
    leaves = []
    for choice in chosen:
        found = list(_matching(root, choice))
        if not found:
            raise OptionError(_unknown(root, choice))
        for name, module in found:
            if type(module).forward is nn.Module.forward:
                raise OptionError(
                    f"option 'leaf_modules': {name} is a {type(module).__name__}, which is never called: "
                    "name the module whose forward chooses among its members"
                )
        leaves += found
    return leaves


def hold_leaves(root: nn.Module, session: Session, chosen: Iterable[type | str]) -> None:
    """Hook the modules that ``chosen`` names, and give each buckets of its own. Idempotent.

    Raises:
        OptionError: as :func:`find_leaves`.
    """
    for name, module in find_leaves(root, chosen):
        entries = [session.entry(p) for p in module.parameters() if session.owns(p)]
        if module not in session.leaves and (entries or not any(True for _ in module.parameters())):
            session.place(entries)
            session.leaves[module] = Leaf(name, module, session)


def _matching(root: nn.Module, choice: type | str) -> Iterator[tuple[str, nn.Module]]:
    """Outermost matches: a leaf inside a leaf is gathered with it."""
    inside: tuple[str, ...] = ()
    for path, module in root.named_modules():
        if inside and path.startswith(inside):
            continue
        name = _without_compiled(path)
        kinds = type(module).__mro__
        by_class = choice in kinds or any(choice == kind.__name__ for kind in kinds)
        if by_class or choice == name:
            inside = (*inside, f"{path}." if path else "")
            yield name, module


def _without_compiled(path: str) -> str:
    """A module's name without what ``torch.compile`` adds."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _unknown(root: nn.Module, choice: type | str) -> str:
    wanted = choice if isinstance(choice, str) else choice.__name__
    kinds = sorted({type(m).__name__ for m in root.modules() if compat.compiled_module(m) is None})
    return (
        f"option 'leaf_modules': no module of {type(root).__name__} has the class or the name "
        f"{wanted!r}. Its classes: {', '.join(kinds)}."
    )
