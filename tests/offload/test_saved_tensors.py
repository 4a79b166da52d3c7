"""Saved tensors off the device: copies, handles and the order of their moves."""

import gc
from pathlib import Path

import pytest
import torch

from zero_runtime.errors import PlanError, SwapError
from zero_runtime.ir.ops import HANDLE_BYTES
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import Phase, Plan, Saved, Tier
from zero_runtime.offload.memory_tiers import MemoryTiers
from zero_runtime.offload.saved_tensors import SavedStore, SavedTensorMoves

CPU = torch.device("cpu")
NUMEL = 5000


@pytest.fixture
def store(tmp_path: Path) -> SavedStore:
    """With room on the host and on NVMe."""
    return SavedStore(MemoryTiers(Offload(folders=(str(tmp_path),))))


def swapped(store: SavedStore) -> int:
    return store._memory_tiers.swapped_bytes


def crossing(store: SavedStore, *tiers: Tier) -> SavedTensorMoves:
    """Of a graph that moves a tensor to each of ``tiers``."""
    saved = tuple(Saved(f"t{n}", NUMEL, "float32", tier) for n, tier in enumerate(tiers))
    return SavedTensorMoves(
        store, Plan("graph0.forward", Phase.FORWARD, 1, "planned", (), (), saved=saved)
    )


def sent(store: SavedStore, tensor: torch.Tensor, tier: Tier) -> torch.Tensor:
    """What autograd holds once the tensor has left."""
    out = crossing(store, tier)
    away = out.start_offload(0, tensor, tensor.data_ptr())
    out.finish_offload(0, tensor.data_ptr())
    out.finish()
    return away


def brought(store: SavedStore, away: torch.Tensor, tier: Tier) -> torch.Tensor:
    back = crossing(store, tier)
    if tier is Tier.NVME:
        back.start_recall(0, away)
    back.start_reload(0, away, CPU)
    tensor = back.finish_reload(0)
    back.finish()
    return tensor


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_tensor_comes_back_as_it_left_and_as_often_as_it_is_wanted(
    store: SavedStore, tier: Tier, dtype: torch.dtype
) -> None:
    tensor = torch.randn(NUMEL).to(dtype)
    plan = Plan(
        "g", Phase.FORWARD, 1, "planned", (), (), saved=(Saved("t", NUMEL, str(dtype)[6:], tier),)
    )
    out, back = SavedTensorMoves(store, plan), SavedTensorMoves(store, plan)
    away = out.start_offload(0, tensor, tensor.data_ptr())
    out.finish_offload(0, tensor.data_ptr())
    found = []
    for _ in range(2):
        if tier is Tier.NVME:
            back.start_recall(0, away)
        back.start_reload(0, away, CPU)
        found.append(back.finish_reload(0))
    assert all(torch.equal(f, tensor) for f in found)
    assert len({f.data_ptr() for f in (*found, tensor, away)}) == 4, "memory of its own each time"


def test_on_the_host_the_copy_itself_is_what_autograd_holds(store: SavedStore) -> None:
    tensor = torch.randn(NUMEL)
    assert torch.equal(sent(store, tensor, Tier.HOST), tensor)
    assert swapped(store) == 0


def test_on_nvme_the_room_lives_as_long_as_any_tensor_on_the_handles_memory(
    store: SavedStore,
) -> None:
    handle = sent(store, torch.randn(NUMEL), Tier.NVME)
    assert (handle.dtype, handle.shape) == (torch.uint8, (HANDLE_BYTES,))
    held = swapped(store)
    assert held >= NUMEL * 4
    view = handle.detach()[:]
    del handle
    gc.collect()
    sent(store, torch.randn(8), Tier.HOST)
    assert swapped(store) == held, "a view still names it"
    del view
    sent(store, torch.randn(8), Tier.HOST)
    assert swapped(store) == 0


def test_autograd_keeps_a_handle_until_its_graph_is_gone(store: SavedStore) -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(sent(store, x.detach(), Tier.NVME))
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            (handle,) = ctx.saved_tensors
            return gradient * brought(store, handle, Tier.NVME)

    x = torch.randn(NUMEL, requires_grad=True)
    loss = Keeps.apply(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, 2 * x.detach())
    sent(store, torch.randn(8), Tier.HOST)
    assert swapped(store) == 0


def test_a_forward_that_fails_half_way_leaves_nothing_on_nvme(store: SavedStore) -> None:
    out = crossing(store, Tier.NVME)
    tensor = torch.randn(NUMEL)
    away = out.start_offload(0, tensor, tensor.data_ptr())
    assert len(out.abandon()) == 1
    out.finish()
    del away
    sent(store, tensor, Tier.HOST)  # gives back what the dead handle had, which is nothing
    assert swapped(store) == 0


def test_what_could_not_be_written_is_told_to_whoever_wants_it(
    store: SavedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = sent(store, torch.randn(NUMEL), Tier.NVME)
    back = crossing(store, Tier.NVME)
    back.start_recall(0, handle)

    def fail() -> None:
        raise SwapError(5, "the disk is broken")

    monkeypatch.setattr(back._recalled[0].reading, "wait", fail)
    with pytest.raises(SwapError, match="the disk is broken"):
        back.start_reload(0, handle, CPU)


def test_every_wrong_order_is_named(store: SavedStore) -> None:
    tensor = torch.randn(NUMEL)
    graph = crossing(store, Tier.HOST, Tier.NVME)
    with pytest.raises(PlanError, match=r"saved tensor 0 \(t0\) was never sent off the device"):
        graph.finish_offload(0, tensor.data_ptr())
    with pytest.raises(PlanError, match=r"saved tensor 0 \(t0\) was awaited before it set out"):
        graph.finish_reload(0)
    with pytest.raises(PlanError, match=r"saved tensor 1 \(t1\) was not recalled from NVMe"):
        graph.start_reload(1, tensor, CPU)
    graph.start_offload(0, tensor, tensor.data_ptr())
    with pytest.raises(PlanError, match="sends a copy of saved tensor 0"):
        graph.finish_offload(0, tensor.data_ptr() + 4)
    with pytest.raises(PlanError, match=r"saved tensor 0 \(t0\) was never waited for"):
        graph.finish()
