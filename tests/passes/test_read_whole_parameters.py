"""read_whole_parameters: at stages 1 and 2 a gather is the parameter itself."""

import torch
from expecttest import TestCase

from graphs import text, traced
from zero_compile import pipeline
from zero_compile.analysis.fx_graph import calls
from zero_compile.passes.read_whole_parameters import read_whole_parameters
from zero_runtime.ir import ops

P, X = torch.randn(4, 4), torch.randn(2, 4)


def linear(p: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matmul, and a view of the parameter that leaves the graph."""
    weight = ops.gather(p, 0)
    return x @ weight, weight.t()


class Snapshot(TestCase):
    def test_before(self) -> None:
        self.assertExpectedInline(
            text(traced(linear, P, X)),
            """\
p_1: float32[4, 4]
x_1: float32[2, 4]
gather = zero3.gather(p_1, 0)
mm = aten.mm(x_1, gather)
t = aten.t(gather)
return [mm, t]
""",
        )

    def test_after(self) -> None:
        self.assertExpectedInline(
            text(read_whole_parameters(traced(linear, P, X))),
            """\
p_1: float32[4, 4]
x_1: float32[2, 4]
mm = aten.mm(x_1, p_1)
t = aten.t(p_1)
keep_default = zero3.keep(t)
return [mm, keep_default]
""",
        )


def test_no_gather_is_left() -> None:
    gm = read_whole_parameters(traced(linear, P, X))
    assert not calls(gm.graph, ops.gather)


def test_values_are_the_parameters_own() -> None:
    product, view = pipeline.run([read_whole_parameters], traced(linear, P, X))(P, X)
    torch.testing.assert_close(product, X @ P)
    torch.testing.assert_close(view, P.t())


def test_what_leaves_the_graph_does_not_share_the_parameters_memory() -> None:
    _, view = pipeline.run([read_whole_parameters], traced(linear, P, X))(P, X)
    assert view.untyped_storage().data_ptr() != P.untyped_storage().data_ptr()
