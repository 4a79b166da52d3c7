"""What must end before each operation of a program may start, and an order that respects it.

Three rules say so (see :mod:`zero_compile.simulator.program`): a channel is first in, first out; an
operation follows those in ``after``; one off the compute channel follows the compute operations
issued earlier.
"""

from collections import Counter
from heapq import heappop, heappush
from typing import NamedTuple

import networkx as nx  # type: ignore[import-untyped]

from zero_compile.simulator.program import Program
from zero_runtime.errors import PlanError
from zero_runtime.ir.plan import Channel


class Needs(NamedTuple):
    """What one operation follows, as indices into the program: None where there is no such.

    ``channel`` is the one before it on its channel, ``compute`` the last compute operation issued
    earlier (compute: None, it is the same).
    """

    channel: int | None
    compute: int | None
    after: tuple[int, ...]

    @property
    def all(self) -> list[int]:
        """All of them; some may come twice."""
        return [i for i in (self.channel, self.compute) if i is not None] + list(self.after)


def needs_of(program: Program) -> list[Needs]:
    """What each operation follows.

    Raises:
        PlanError: two operations have one name, or ``after`` names an operation that is not there or
            is issued later on the same channel; all such faults are listed.
    """
    index = {op.name: i for i, op in enumerate(program.ops)}
    refuse(program, _naming_faults(program, index))
    last: dict[Channel, int] = {}
    needs = []
    for i, op in enumerate(program.ops):
        compute = None if op.channel is Channel.COMPUTE else last.get(Channel.COMPUTE)
        after = tuple(index[name] for name in op.after)
        needs.append(Needs(last.get(op.channel), compute, after))
        last[op.channel] = i
    return needs


def _naming_faults(program: Program, index: dict[str, int]) -> list[str]:
    counts = Counter(op.name for op in program.ops)
    faults = [f"{count} operations are named {name}" for name, count in counts.items() if count > 1]
    for i, op in enumerate(program.ops):
        for name in op.after:
            if name not in index:
                faults.append(f"{op.name} waits for {name}, which is not in the program")
            elif index[name] >= i and program.ops[index[name]].channel is op.channel:
                faults.append(
                    f"{op.name} waits for {name}, which the {op.channel} channel runs "
                    f"{'later' if index[name] > i else 'as the same operation'}: deadlock"
                )
    return faults


def execution_order(program: Program, needs: list[Needs]) -> list[int]:
    """The operations such that each comes after what it follows, in issue order where that is free.

    Raises:
        PlanError: operations wait for each other; the message names the cycle.
    """
    followers: list[list[int]] = [[] for _ in needs]
    missing = [0] * len(needs)
    for i, need in enumerate(needs):
        for earlier in need.all:
            followers[earlier].append(i)
            missing[i] += 1
    ready = [i for i, count in enumerate(missing) if not count]
    order = []
    while ready:
        i = heappop(ready)
        order.append(i)
        for follower in followers[i]:
            missing[follower] -= 1
            if not missing[follower]:
                heappush(ready, follower)
    if len(order) < len(needs):
        refuse(program, [_cycle(program, needs)])
    return order


def _cycle(program: Program, needs: list[Needs]) -> str:
    graph = nx.DiGraph((i, earlier) for i, need in enumerate(needs) for earlier in need.all)
    names = [program.ops[i].name for i, _ in nx.find_cycle(graph)]
    return "deadlock: " + " waits for ".join([*names, names[0]])


#: Faults told in full; of more, only how many there are.
MOST_FAULTS = 20


def refuse(program: Program, faults: list[str]) -> None:
    """Raises PlanError with all ``faults``, a line each; does nothing if there are none."""
    if not faults:
        return
    many = f"{len(faults)} faults" if len(faults) > 1 else "a fault"
    lines = [f"  {fault}" for fault in faults[:MOST_FAULTS]]
    if len(faults) > MOST_FAULTS:
        lines.append(f"  and {len(faults) - MOST_FAULTS} more")
    raise PlanError("\n".join([f"program {program.name} has {many}:", *lines]))
