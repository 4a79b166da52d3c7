"""The tool that shows plans."""

from pathlib import Path

import torch
from torch import nn
from typer.testing import CliRunner

import zero_compile
from tools.dump_schedule import main


def test_a_written_plan_is_shown_step_by_step(tmp_path: Path) -> None:
    import typer

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    torch.compile(model, backend="zero3")(torch.ones(1, 4)).sum().backward()
    files = []
    for plan in zero_compile.plans(model):
        files.append(tmp_path / f"{plan.name}.json")
        files[-1].write_text(plan.to_json())
    app = typer.Typer()
    app.command()(main)
    shown = CliRunner().invoke(app, [str(f) for f in files], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    for word in (
        "forward",
        "backward",
        "all_gather_start",
        "release",
        "reduce_scatter_wait",
        "0.weight",
    ):
        assert word in shown.output
