"""Put every start and wait where the planner wants it.

A gather starts before the node that its schedule names, a reduction is waited for before the node
that its schedule names, and gathers for the next graph start here and are waited for there. Buckets
that arrive gathered are taken over at the beginning, where their memory begins to count.
"""

from collections.abc import Mapping

from torch.fx import Graph, GraphModule, Node

from zero_compile.analysis.costs import kernels_before
from zero_compile.analysis.fx_graph import calls, output_node, positions
from zero_compile.passes.insert import assemble_last, insert_call, token_of
from zero_compile.scheduler.decide_schedule import GraphSchedule
from zero_runtime.ir import ops
from zero_runtime.ir.plan import dtype_of


def schedule_planned(gm: GraphModule, *, schedule: GraphSchedule) -> GraphModule:
    """Move ``all_gather_start`` and ``reduce_scatter_wait``; insert the gathers for the next graph."""
    graph = gm.graph
    named = _named(schedule)
    places = {node.name: node for node in graph.nodes if node.name in named}
    _wait_for_reductions(graph, schedule, places)
    _start_gathers(graph, schedule, places)
    _begin(graph, schedule)
    graph.lint()
    return gm


def _named(schedule: GraphSchedule) -> set[str]:
    names = {
        *schedule.starts.values(),
        *schedule.waits.values(),
        *(e.before for e in schedule.early),
    }
    return {name for name in names if name}


def _wait_for_reductions(graph: Graph, schedule: GraphSchedule, places: Mapping[str, Node]) -> None:
    """Before the starts are moved: a start at the same place may need the memory that this frees."""
    order = positions(graph)
    for number, start in enumerate(calls(graph, ops.reduce_scatter_start)):
        wait = next(iter(start.users))
        if number not in schedule.waits:
            continue
        place = _place(graph, schedule.waits[number], places)
        if order[place] > order[start]:
            place.prepend(wait)
    _wait_before_the_next_starts(graph)
    assemble_last(graph)


def _wait_before_the_next_starts(graph: Graph) -> None:
    """Where a reduction is waited for and a later one starts between the same kernels, wait first.

    The channel would make the later one wait anyway; this way it takes its memory after the earlier
    one has returned its own.
    """
    units, order = kernels_before(graph), positions(graph)
    starts = calls(graph, ops.reduce_scatter_start)
    waits = [next(iter(start.users)) for start in starts]
    for number, wait in enumerate(waits):
        for later in starts[number + 1 :]:
            if units[later] > units[wait]:
                break
            if units[later] == units[wait] and order[later] < order[wait]:
                later.prepend(wait)
                break


def _start_gathers(graph: Graph, schedule: GraphSchedule, places: Mapping[str, Node]) -> None:
    """In the order of first use, which is the order of the channel."""
    order = positions(graph)
    for number, wait in enumerate(calls(graph, ops.all_gather_wait)):
        name, start = schedule.starts.get(number), wait.all_input_nodes[0]
        if name:
            (places[name] if order[places[name]] < order[wait] else wait).prepend(start)
    for early in schedule.early:
        with graph.inserting_before(_place(graph, early.before, places)):
            dtype = dtype_of(early.dtype)
            insert_call(graph, ops.all_gather_start, token_of(graph), early.bucket, dtype)


def _begin(graph: Graph, schedule: GraphSchedule) -> None:
    """What stands at the beginning: first the buckets that arrive gathered, then the first gathers."""
    waits = list(enumerate(calls(graph, ops.all_gather_wait)))
    opening = [wait for number, wait in waits if schedule.starts.get(number) == ""]
    gather_cache = [wait for number, wait in waits if number in schedule.carried_in]
    for wait in reversed([*gather_cache, *opening]):
        token_of(graph).append(wait.all_input_nodes[0])


def _place(graph: Graph, name: str | None, places: Mapping[str, Node]) -> Node:
    if name is None:
        return output_node(graph)
    return places[name] if name else token_of(graph).next
