"""Ranks that are about to run different things get an error, not a hang and not a wrong number."""

import datetime
import logging
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import ranks
import zero_compile
from zero_runtime.comm import consistency, patience
from zero_runtime.comm.consistency import (
    Describe,
    EveryAgreement,
    MessageAgreement,
    NoAgreement,
    StoreAgreement,
    agreement_for,
    digest_of,
)
from zero_runtime.errors import DivergenceError

FakeGroup = Callable[[int], None]


class Experts(nn.Module):
    """Two branches; ``choice`` says which one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.experts[choice](self.gate(x))


class Routed(Experts):
    """The choice depends on data, so each expert is a graph of its own."""

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        x = self.gate(x)
        torch._dynamo.graph_break()
        return self.experts[choice](x)


def _chosen(kind: type[Experts]) -> tuple[str, float]:
    torch.manual_seed(0)
    model = kind()
    compiled = torch.compile(model, backend="zero3")
    x = torch.randn(2, 4)
    with torch.no_grad():
        for choice in (0, 1):
            compiled(x, choice)
    dist.barrier()
    began = time.monotonic()
    try:
        compiled(x, dist.get_rank()).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", 0.0


@pytest.mark.parametrize("kind", [Experts, Routed])
def test_ranks_that_choose_different_experts_are_both_told(kind: type[Experts]) -> None:
    for message, seconds in ranks.run(2, _chosen, kind):
        assert message.startswith("DivergenceError"), message
        assert "ranks " in message
        assert "experts.0" in message
        assert "experts.1" in message
        assert seconds < 60


def test_ranks_that_read_different_parameters_eagerly_are_both_told() -> None:
    for message in ranks.run(2, _trained_then_read):
        assert message.startswith("DivergenceError"), message
        assert "experts.0.weight" in message
        assert "experts.1.weight" in message


def _trained_then_read() -> str:
    torch.manual_seed(0)
    model = Experts()
    compiled = torch.compile(model, backend="zero3")
    for choice in (0, 1):
        compiled(torch.randn(2, 4), choice).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    dist.barrier()
    try:
        model.experts[dist.get_rank()].weight.detach()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _generation() -> str:
    """Rank 1 stops generating early and trains; rank 0 still generates."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend="zero3")
    x = torch.randn(2, 4)
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(x)
    dist.barrier()
    try:
        with torch.no_grad():
            for _ in range(3 - dist.get_rank()):
                compiled(x)
        compiled(x).sum().backward()
    except DivergenceError as error:
        return str(error)
    return "no error"


def test_generation_that_ends_at_different_lengths_is_told() -> None:
    for message in ranks.run(2, _generation):
        assert "inference graph" in message
        assert "forward graph" in message


def _third_rank_differs() -> str:
    torch.manual_seed(0)
    model = Experts()
    compiled = torch.compile(model, backend="zero3")
    with torch.no_grad():
        for choice in (0, 1):
            compiled(torch.randn(2, 4), choice)
    dist.barrier()
    try:
        with torch.no_grad():
            compiled(torch.randn(2, 4), int(dist.get_rank() == 2))
    except DivergenceError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_of_three_ranks_all_learn_that_one_differs() -> None:
    for message in ranks.run(3, _third_rank_differs):
        assert "ranks " in message
        assert "2" in message


def _own_shapes() -> list[float]:
    """Different batch sizes, hence recompilation on one rank only, are legitimate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    compiled = torch.compile(model, backend="zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        rows = 3 + step * dist.get_rank()
        loss = compiled(torch.ones(rows, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_ranks_with_different_batch_sizes_train_together() -> None:
    first, second = ranks.run(2, _own_shapes)
    assert first == pytest.approx(second, rel=1e-5)
    assert first[-1] < first[0]


def _own_seed(rest: bool) -> str:
    """Each rank builds another model; ``rest``: only in what no graph uses."""
    torch.manual_seed(0 if rest else dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4))
    if rest:
        model.spare = nn.Parameter(torch.full((3,), float(dist.get_rank())))
    compiled = torch.compile(model, backend="zero3")
    try:
        compiled(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    except DivergenceError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("rest", [False, True])
def test_ranks_that_built_different_models_are_told(rest: bool) -> None:
    for message in ranks.run(2, _own_seed, rest):
        assert "initial bits" in message
        assert "same seed" in message
        assert ("spare" if rest else "0.weight") in message


# ------------------------------------------------------------------------------ agreement


OUTLINE = ["a forward graph", "all_gather_start of bucket 0 (up)", "release of bucket 0 (up)"]
_ADVICE = "Ranks must do the same in the same order"


def _store_agreement(
    outline: list[str], checker: StoreAgreement | None = None, *, new: bool = True
) -> str:
    """What a check on a group of its own says: notes of other tests bear other groups' names."""
    checker = checker or StoreAgreement(dist.new_group())
    try:
        checker.check(digest_of(outline), lambda: outline, new=new)
    except DivergenceError as error:
        return str(error)
    return "agreed"


def _equal() -> list[str]:
    """Two graphs that both ranks reach, one late, and a known graph that only rank 0 runs."""
    checker = StoreAgreement(dist.new_group())
    said = []
    for outline in (OUTLINE, [*OUTLINE, "more"]):
        time.sleep(0.3 * dist.get_rank())
        said.append(_store_agreement(outline, checker))
    if dist.get_rank() == 0:
        said.append(_store_agreement(OUTLINE, checker, new=False))
    return said


def test_ranks_that_reach_equal_graphs_agree_through_the_store() -> None:
    assert ranks.run(2, _equal) == [["agreed"] * 3, ["agreed"] * 2]


def _second_graph_differs(lines: list[list[str]]) -> str:
    checker = StoreAgreement(dist.new_group())
    assert _store_agreement(["an inference graph"], checker) == "agreed"
    return _store_agreement(lines[dist.get_rank()], checker)


@pytest.mark.parametrize(
    ("other", "step", "theirs"),
    [
        ([OUTLINE[0], "all_gather_start of bucket 1 (down)", OUTLINE[2]], 1, None),
        (["a backward graph", "reduce_scatter_start"], 0, None),
        (OUTLINE[:2], 2, "nothing"),
    ],
)
def test_ranks_that_reach_different_graphs_are_both_told_the_first_difference(
    other: list[str], step: int, theirs: str | None
) -> None:
    theirs = theirs or other[step]
    first, second = ranks.run(2, _second_graph_differs, [OUTLINE, other])
    assert first.startswith(
        f"ranks 0 and 1 differ at step {step}: rank 0 is about to run {OUTLINE[step]}; "
        f"rank 1: {theirs}. {_ADVICE}"
    )
    assert second.startswith(
        f"ranks 1 and 0 differ at step {step}: rank 1 is about to run {theirs}; "
        f"rank 0: {OUTLINE[step]}. {_ADVICE}"
    )


def _one_stays_away() -> str:
    """Rank 1 does not come; rank 0 waits a second for it."""
    checker = StoreAgreement(dist.new_group())
    if dist.get_rank() == 1:
        return "stayed away"
    with mock.patch.object(consistency, "_FIRST_RUN", datetime.timedelta(seconds=1)):
        return _store_agreement(OUTLINE, checker)


def test_a_rank_that_does_not_reach_a_new_graph_is_named() -> None:
    first, second = ranks.run(2, _one_stays_away)
    assert second == "stayed away"
    assert first.startswith(
        f"rank 0 has reached a new graph and rank 1 has not, within 1 s. {_ADVICE}"
    )
    assert first.endswith("\nrank 0 is about to run: a forward graph")


def _one_keeps_silent() -> str:
    """Rank 1 is about to run something else and ends before it can say what."""
    group = dist.new_group()
    if dist.get_rank() == 1:
        outline = [f"what only {time.time_ns()} knows"]
        consistency._Notes(group).write(f"0 {digest_of(outline)}", 1, consistency._STANDS)
        return "said nothing"
    with mock.patch.object(consistency, "_EXPLANATION", datetime.timedelta(seconds=1)):
        return _store_agreement(OUTLINE, StoreAgreement(group))


def test_a_rank_that_does_not_explain_itself_is_named_all_the_same() -> None:
    first, second = ranks.run(2, _one_keeps_silent)
    assert second == "said nothing"
    assert "rank 0 is about to run a forward graph; rank 1: something it did not tell." in first


def _no_message() -> str:
    """Rank 1 sends no message; rank 0's backend waits two seconds for it."""
    dist.barrier()  # ranks that are late would miss the new group's short limit
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    said = "stayed away"
    if dist.get_rank() == 0:
        try:
            MessageAgreement(group).check(digest_of(OUTLINE), lambda: OUTLINE, new=True)
        except DivergenceError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_neighbour_that_sends_no_message_is_told_in_our_words_and_the_backends() -> None:
    first, second = ranks.run(2, _no_message)
    assert second == "stayed away"
    assert first.startswith("rank 0 was about to run a forward graph, and a neighbour did not come")
    assert _ADVICE in first
    assert "The backend says: " in first
    assert "Timed out" in first


def _slow() -> list[str]:
    """Rank 1 comes late; what rank 0 logs meanwhile."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_runtime").addHandler(handler)
    checkers = MessageAgreement(dist.new_group()), StoreAgreement(dist.new_group())
    with mock.patch.object(patience, "LIMIT", 0.2):
        for checker in checkers:
            dist.barrier()
            time.sleep(1.5 * dist.get_rank())
            checker.check(digest_of(OUTLINE), lambda: OUTLINE, new=True)
        dist.barrier()
    logging.getLogger("zero_runtime").removeHandler(handler)
    return records


def test_a_rank_that_waits_long_says_for_whom_and_where() -> None:
    first, second = ranks.run(2, _slow)
    assert not second
    assert len(first) == 2
    for said in first:
        assert "rank 1 to do the same as rank 0, which is about to run a forward graph" in said


ALONE: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda m: float(m.weight.grad.norm()),
    "clip": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "sum": lambda m: m.weight.grad.sum(),
    "max": lambda m: m.weight.grad.max(),
    "equal": lambda m: torch.equal(m.weight.grad, m.weight.grad),
    "index": lambda m: m.weight.grad[0],
    "full": lambda m: m.weight.grad.full_tensor(),
    "data": lambda m: m.weight.data,
    "scaler": lambda m: torch._amp_foreach_non_finite_check_and_unscale_(
        [m.weight.grad], torch.zeros(1), torch.ones(1)
    ),
    "state": lambda m: zero_compile.safe_get_full_grad(m.weight),
}


def _one_alone(what: str) -> tuple[str, float]:
    """Rank 1 does something collective that rank 0 does not: rank 0 goes on training."""
    model: Any = nn.Linear(4, 4)
    step = torch.compile(model, backend="zero3")
    step(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    began = time.monotonic()
    try:
        if dist.get_rank() == 1:
            ALONE[what](model)
        step(torch.ones(2, 4))
    except DivergenceError as error:
        return str(error), time.monotonic() - began
    return "no error", 0.0


@pytest.mark.parametrize("what", ALONE)
def test_what_one_rank_does_alone_is_told_to_both(what: str) -> None:
    for said, seconds in ranks.run(2, _one_alone, what):
        assert said.startswith("ranks "), said
        assert "a forward graph" in said
        assert "weight" in said or what == "scaler"
        assert seconds < 30


def _backward_after_step() -> str:
    """A rank may own nothing of a parameter that the step has changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    step = torch.compile(model, backend="zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = step(torch.ones(2, 2)).sum()
    step(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    try:
        old.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_backward_through_what_a_step_has_changed_is_told_to_all() -> None:
    for said in ranks.run(2, _backward_after_step):
        assert "modified by an inplace operation" in said


def _alone_again() -> list[str]:
    """Rank 1 alone compiles a graph anew, in another state of the run; rank 0 has gone on."""
    checker = StoreAgreement(dist.new_group())
    said = [_store_agreement(OUTLINE, checker)]
    if dist.get_rank() == 1:
        with mock.patch.object(consistency, "_FIRST_RUN", datetime.timedelta(seconds=1)):
            lines = [*OUTLINE, "after 3 optimizer steps"]
            checker.check(digest_of(lines), lambda: lines, new=True, lasting=lambda: OUTLINE)
        said.append("agreed")
    return [*said, _store_agreement(["a backward graph"], checker)]


def test_a_rank_that_alone_compiles_a_known_graph_anew_waits_for_nobody() -> None:
    assert ranks.run(2, _alone_again) == [["agreed"] * 2, ["agreed"] * 3]


def _two_models() -> list[str]:
    """Two models on one group, each with an agreement of its own, and ranks of different speed."""
    group = dist.new_group()
    said = []
    for outline in (["model A"], ["model B"], ["model A, backward"]):
        time.sleep(0.2 * dist.get_rank())
        said.append(_store_agreement(outline, StoreAgreement(group)))
    return said


def test_two_models_on_one_group_do_not_read_each_others_notes() -> None:
    assert ranks.run(2, _two_models) == [["agreed"] * 3] * 2


def _late() -> list[str]:
    """Rank 1 comes when rank 0 has given up; then both try once more."""
    checker = StoreAgreement(dist.new_group())
    said = []
    with mock.patch.object(consistency, "_FIRST_RUN", datetime.timedelta(seconds=1)):
        if dist.get_rank() == 0:
            said.append(_store_agreement(OUTLINE, checker))
        dist.barrier()
        if dist.get_rank() == 1:
            said.append(_store_agreement(OUTLINE, checker))
        dist.barrier()
    return [*said, _store_agreement(OUTLINE, checker)]


def test_a_rank_that_comes_too_late_is_told_and_does_not_go_on_alone() -> None:
    first, second = ranks.run(2, _late)
    assert "rank 1 has not, within 1 s" in first[0]
    assert "rank 0 has given up waiting for others there" in second[0]
    assert [first[1], second[1]] == ["agreed"] * 2


def _again_after_an_error() -> list[str]:
    checker = StoreAgreement(dist.new_group())
    said = [_store_agreement([f"only rank {dist.get_rank()} does this"], checker)]
    time.sleep(0.3 * dist.get_rank())
    return [*said, _store_agreement(OUTLINE, checker)]


def test_ranks_that_go_on_together_after_an_error_agree_again() -> None:
    for error, after in ranks.run(2, _again_after_an_error):
        assert "only rank 0 does this" in error
        assert "only rank 1 does this" in error
        assert after == "agreed"


def _in_a_group_of_the_last() -> str:
    """The last two of three ranks have a group, in which they are the first and the second."""
    group = dist.new_group([1, 2])
    if dist.get_rank() != 1:
        return "stayed away"
    with mock.patch.object(consistency, "_FIRST_RUN", datetime.timedelta(seconds=1)):
        return _store_agreement(OUTLINE, StoreAgreement(group))


@pytest.mark.slow
def test_ranks_are_named_as_in_the_whole_job() -> None:
    _, said, _ = ranks.run(3, _in_a_group_of_the_last)
    assert said.startswith("rank 1 has reached a new graph and rank 2 has not, within 1 s.")
    assert said.endswith("rank 1 is about to run: a forward graph")


def _by_notes(function: Callable[..., Any], *args: Any) -> Any:
    """``function`` with the agreement of backends without cheap messages."""
    with mock.patch.object(consistency, "_agreement", StoreAgreement):
        return function(*args)


def test_by_notes_ranks_with_different_batch_sizes_train_together() -> None:
    first, second = ranks.run(2, _by_notes, _own_shapes)
    assert first == pytest.approx(second, rel=1e-5)


def _two_trained() -> list[float]:
    """Two models on one group, used in turns."""
    return [loss for _ in range(2) for loss in _own_shapes()]


def test_by_notes_two_models_on_one_group_train() -> None:
    first, second = ranks.run(2, _by_notes, _two_trained)
    assert first == pytest.approx(second, rel=1e-5)


def test_by_notes_ranks_that_built_different_models_are_told() -> None:
    for message in ranks.run(2, _by_notes, _own_seed, False):
        assert "initial bits" in message
        assert "0.weight" in message


class _Recorder:
    """Agrees, or raises; remembers what it was asked."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.asked: list[tuple[str, list[str], bool]] = []

    def check(
        self, digest: str, describe: Describe, *, new: bool, lasting: Describe | None = None
    ) -> None:
        self.asked.append((digest, describe(), new))
        if self.error is not None:
            raise DivergenceError(self.error)


@pytest.mark.parametrize("new", [True, False])
def test_every_agreement_asks_all(new: bool) -> None:
    parts = [_Recorder(), _Recorder()]
    EveryAgreement(parts).check("abc", lambda: OUTLINE, new=new)
    assert [p.asked for p in parts] == [[("abc", OUTLINE, new)]] * 2


@pytest.mark.parametrize("disagrees", [0, 1])
def test_one_that_differs_is_enough(disagrees: int) -> None:
    parts = [_Recorder(), _Recorder()]
    parts[disagrees].error = f"the ranks of group {disagrees} differ"
    with pytest.raises(DivergenceError, match=f"^the ranks of group {disagrees} differ$"):
        EveryAgreement(parts).check("abc", lambda: OUTLINE, new=True)
    assert [len(p.asked) for p in parts] == [1, disagrees]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("nccl", StoreAgreement), ("gloo", MessageAgreement), ("fake", NoAgreement)],
)
def test_how_ranks_agree_depends_on_the_backend(
    fake_group: FakeGroup, backend: str, kind: type
) -> None:
    fake_group(2)
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(consistency.compat, "backend_name", return_value=backend):
        chosen = agreement_for([group])
        assert [type(a) for a in chosen._agreements] == [kind]  # type: ignore[attr-defined]


def test_one_rank_agrees_with_itself(fake_group: FakeGroup) -> None:
    fake_group(1)
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(consistency.compat, "backend_name", return_value="nccl"):
        agreement_for([group]).check("abc", lambda: OUTLINE, new=True)


def _limited() -> str:
    """Rank 1 alone may compile one version of a function, and calls a second one eagerly."""
    torch.manual_seed(0)
    model = Experts()
    zero_compile.partition(model)  # so that both ranks make the same buckets, whatever they compile
    compiled = torch.compile(model, backend="zero3", dynamic=False)
    x = torch.randn(2, 4)
    counters.clear()
    try:
        with torch._dynamo.config.patch(recompile_limit=1 + 7 * (1 - dist.get_rank())):
            for choice in (0, 1):
                compiled(x, choice).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        counters.clear()
    return "no error"


def test_a_rank_that_alone_passed_the_recompile_limit_is_named_on_all() -> None:
    for message in ranks.run(2, _limited):
        assert message.startswith("DivergenceError"), message
        assert "Rank 1 has passed torch._dynamo.config.recompile_limit = 1" in message
        assert "Rank 0 has passed" not in message
