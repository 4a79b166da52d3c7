"""Which modules of a model are leaves: gathered whole, whatever a rank uses of them."""

from collections.abc import Iterable, Iterator

from torch import nn

from zero_runtime.errors import OptionError
from zero_runtime.leaf import Leaf
from zero_runtime.session import Session


def hold_leaves(root: nn.Module, session: Session, chosen: Iterable[type | str]) -> None:
    """Hook the modules that ``chosen`` names, and give each buckets of its own. Idempotent.

    Raises:
        OptionError: a name or class that no module of ``root`` answers to.
    """
    for choice in chosen:
        found = list(_matching(root, choice))
        if not found:
            raise OptionError(_unknown(root, choice))
        for name, module in found:
            if module not in session.leaves:
                entries = [session.entry(p) for p in module.parameters() if session.owns(p)]
                session.place(entries)
                session.leaves[module] = Leaf(name, module, session)


def _matching(root: nn.Module, choice: type | str) -> Iterator[tuple[str, nn.Module]]:
    """Outermost matches: a leaf inside a leaf is gathered with it."""
    inside: tuple[str, ...] = ()
    for name, module in root.named_modules():
        if inside and name.startswith(inside):
            continue
        kinds = type(module).__mro__
        by_class = choice in kinds or any(choice == kind.__name__ for kind in kinds)
        if by_class or choice == name.removeprefix("_orig_mod."):
            inside = (*inside, f"{name}." if name else "")
            yield name, module


def _unknown(root: nn.Module, choice: type | str) -> str:
    wanted = choice if isinstance(choice, str) else choice.__name__
    kinds = sorted({type(m).__name__ for m in root.modules()})
    return (
        f"option 'leaf_modules': no module of {type(root).__name__} has the class or the name "
        f"{wanted!r}. Its classes: {', '.join(kinds)}."
    )
