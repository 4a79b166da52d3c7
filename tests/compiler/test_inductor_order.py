"""What Inductor's own passes leave of the order: in its last graph nothing reads what was released."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.fx import Graph, Node

from graphs import TinyGpt, fake_world, make_mlp
from zero_compile.analysis.fx_graph import calls, positions, readers
from zero_runtime.ir import ops


class Sum(nn.Module):
    """Products that Inductor could put behind one another's releases: only their sum needs them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=bias) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x) + self.c(x)


class Residual(nn.Module):
    """Products added to what comes much later: Inductor fuses such pairs into one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return early + x


_TOKENS = torch.zeros(2, 4, dtype=torch.int64)
_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "sum": (lambda: Sum(bias=True), (torch.randn(2, 8),)),
    "sum_without_bias": (lambda: Sum(bias=False), (torch.randn(2, 8),)),
    "residual": (Residual, (torch.randn(2, 8),)),
    "mlp": (make_mlp, (torch.randn(3, 8),)),
    "gpt": (TinyGpt, (_TOKENS, _TOKENS)),
}


@pytest.fixture
def last_graphs() -> Iterator[list[Graph]]:
    """Every graph as Inductor's passes leave it."""
    found: list[Graph] = []
    with config.patch(post_grad_custom_post_pass=found.append, fx_graph_cache=False):
        yield found


def read_too_late(graph: Graph) -> list[tuple[Node, Node]]:
    """Releases, each with what reads their memory after them."""
    order = positions(graph)
    return [
        (release, reader)
        for release in calls(graph, ops.release)
        for reader in readers(release.all_input_nodes[0])
        if order[reader] > order[release]
    ]


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "inference"])
@pytest.mark.parametrize("name", _MODELS)
def test_nothing_reads_a_bucket_behind_its_release(
    name: str, trained: bool, last_graphs: list[Graph]
) -> None:
    make, inputs = _MODELS[name]
    with fake_world(2), torch.set_grad_enabled(trained):
        given = [x.requires_grad_(trained) if x.is_floating_point() else x for x in inputs]
        result = torch.compile(make(), backend="zero3", options={"bucket_bytes": 1})(*given)
        if trained:
            result.sum().backward()
    assert len(last_graphs) == 1 + trained
    for graph in last_graphs:
        assert calls(graph, ops.release)
        assert not read_too_late(graph)
