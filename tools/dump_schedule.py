"""Show what a training step would do: ``python -m zero_compile.tools.dump_schedule hf:llama-3-8b --world-size 64``.

Nothing is allocated and no other rank is needed: parameters are fake, ranks imagined. TARGET is a
model (``hf:NAME``, ``package.module:callable``, ``path/to/file.py:callable``) or a JSON file that this
tool, or a run, has written.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from zero_compile.analysis.tiers import is_evicted
from zero_compile.api.preview import GraphPreview, Preview
from zero_compile.simulator.explain import explain
from zero_runtime.errors import OptionError, ZeroError
from zero_runtime.ir.plan import Channel, StepKind, dtype_of, reduced_numel

from . import document
from .document import Document
from .models import Shape
from .plan_tables import buckets_table, steps_table, summary
from .render import diff, page, tables, trace
from .render.tables import channel_text, si_bytes
from .sizing import Wanted, formula, largest_batch

_MANY = 200
_OUT = {"dir_okay": False, "writable": True}


def main(
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET...", help="a model, or JSON files")
    ],
    world_size: Annotated[int, typer.Option(min=1, help="ranks")] = 8,
    stage: Annotated[int, typer.Option(min=1, max=3, help="ZeRO stage")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="sequences a rank")] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="tokens a sequence")] = 1024,
    dtype: Annotated[str, typer.Option(help="dtype of parameters")] = "float32",
    masters: Annotated[bool, typer.Option(help="float32 master weights of a 16-bit model")] = False,
    device_memory: Annotated[str | None, typer.Option(help="budget, such as 80GiB")] = None,
    hardware: Annotated[str | None, typer.Option(help="profile, by name or file")] = None,
    schedule: Annotated[
        str, typer.Option(help="planned, one_ahead, on_demand or all_first")
    ] = "planned",
    option: Annotated[
        list[str] | None, typer.Option(help="further name=value, JSON values")
    ] = None,
    infer: Annotated[bool, typer.Option(help="forward without gradients")] = False,
    why: Annotated[list[int] | None, typer.Option(help="explain this bucket")] = None,
    compare: Annotated[bool, typer.Option("--diff", help="compare two JSON files")] = False,
    show_formula: Annotated[
        bool, typer.Option("--formula", help="memory by batch and ranks")
    ] = False,
    fit: Annotated[bool, typer.Option("--largest-batch", help="that fits --device-memory")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", **_OUT)] = None,
    html_file: Annotated[Path | None, typer.Option("--html", **_OUT)] = None,
    trace_file: Annotated[Path | None, typer.Option("--trace", **_OUT)] = None,
    graph_file: Annotated[Path | None, typer.Option("--graph", **_OUT)] = None,
    most: Annotated[int, typer.Option(help="steps to print, 0 for all")] = _MANY,
) -> None:
    """Plan a model's step and show it, or show and compare what was written before."""
    console = Console()
    files = _Files(json_file, html_file, trace_file, graph_file)
    try:
        files.check()
        if compare:
            _compare(console, targets)
        elif all(target.endswith(".json") for target in targets):
            _show_files(console, targets, most, files)
        else:
            settings = _settings(device_memory, hardware, schedule, dtype, masters, option)
            wanted = Wanted(
                _only(targets),
                Shape(batch, sequence, _floating(dtype)),
                world_size,
                stage,
                settings,
            )
            planned = _plan(console, wanted, train=not infer, most=most, files=files)
            for bucket in why or []:
                _explain(console, planned, bucket)
            if show_formula:
                console.print(formula(wanted, planned))
            if fit:
                console.print(largest_batch(wanted))
    except (ZeroError, OptionError, OSError, ValueError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None


@dataclass(frozen=True)
class _Files:
    """Where to write what; None for nowhere."""

    json: Path | None
    html: Path | None
    trace: Path | None
    graph: Path | None

    def check(self) -> None:
        """Before anything is planned: the folders must be there."""
        for path in (self.json, self.html, self.trace, self.graph):
            if path is not None and not path.absolute().parent.is_dir():
                raise OptionError(f"cannot write {path}: there is no folder {path.parent}")

    def write(self, made: Document) -> None:
        if self.json is not None:
            made.write(self.json)
        if (self.html or self.trace) and not made.timelines:
            raise OptionError(
                "a page or a trace needs a timeline: name a model, or files with timelines"
            )
        if self.html is not None:
            self.html.write_text(page.page(made.timelines, made.title, made.facts), "utf-8")
        if self.trace is not None:
            self.trace.write_text(json.dumps(trace.chrome_trace(made.timelines)))


def _show_files(console: Console, targets: Sequence[str], most: int, files: _Files) -> None:
    if files.graph is not None:
        raise OptionError("--graph needs a model: JSON files hold no graphs")
    found = [document.read(Path(target)) for target in targets]
    for one in found:
        _show_document(console, one, most)
    files.write(_merged(found))


def _plan(console: Console, wanted: Wanted, *, train: bool, most: int, files: _Files) -> Preview:
    began = time.monotonic()
    planned = wanted.plan(train=train, checked=True)
    seconds = time.monotonic() - began
    made = _document(wanted, planned)
    _show_document(console, made, most)
    console.print(f"planned in {seconds:.1f} s")
    if files.graph is not None:
        files.graph.write_text(_code(planned))
    files.write(made)
    return planned


def _only(targets: Sequence[str]) -> str:
    if len(targets) != 1:
        raise OptionError(f"one model at a time, or JSON files only; got {', '.join(targets)}")
    return targets[0]


def _floating(name: str) -> torch.dtype:
    dtype = dtype_of(name)
    if not dtype.is_floating_point:
        raise OptionError(
            f"--dtype {name}: parameters are floating-point numbers, such as bfloat16"
        )
    return dtype


def _settings(
    device_memory: str | None,
    hardware: str | None,
    schedule: str,
    dtype: str,
    masters: bool,
    further: Sequence[str] | None,
) -> dict[str, Any]:
    settings: dict[str, Any] = {"hardware": hardware or "h100", "schedule": schedule}
    if device_memory is not None:
        settings["device_memory"] = device_memory
    if masters:
        settings["fp16" if dtype == "float16" else "bf16"] = True
    for pair in further or []:
        name, sign, value = pair.partition("=")
        if not sign:
            raise OptionError(f"--option {pair!r}: write name=value")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


def _document(wanted: Wanted, planned: Preview) -> Document:
    kept, traffic, shape = planned.resident, planned.traffic, wanted.shape
    between = _between_tiers(planned)
    here = " on the device" if between else ""
    facts = {
        "model": f"{wanted.target}, {planned.parameters:,} parameters",
        "ranks": f"{planned.world_size:,}, stage {wanted.stage}",
        "input": f"{shape.batch} x {shape.sequence} tokens a rank, {shape.dtype}",
        "hardware": str(wanted.settings["hardware"]),
        "schedule": str(wanted.settings["schedule"]),
        f"parameter shards{here}": si_bytes(kept.shards),
        f"gradient shards{here}": si_bytes(sum_of_gradients(planned)),
        f"optimizer state{here}": si_bytes(kept.optimizer),
        "sent a rank a step": f"{si_bytes(traffic.total)} (gathers {si_bytes(traffic.all_gather)}, "
        f"reductions {si_bytes(traffic.reduce_scatter)})",
        **between,
    }
    plans = tuple(plan for graph in planned.graphs for plan in graph.plans)
    return Document(wanted.target, facts, plans, tuple(graph.timeline for graph in planned.graphs))


def _between_tiers(planned: Preview) -> dict[str, str]:
    """What one rank moves between its device, its host and its drive; nothing where it moves nothing."""
    ops = [op for graph in planned.graphs for op in graph.program.ops]
    channels = (Channel.NVME_READ, Channel.HOST_TO_DEVICE, Channel.DEVICE_TO_HOST)
    moved = {c: sum(op.bytes for op in ops if op.channel is c) for c in channels}
    told = [f"{channel_text(c)} {si_bytes(size)}" for c, size in moved.items() if size]
    return {"moved a rank a step": ", ".join(told)} if told else {}


def sum_of_gradients(planned: Preview) -> int:
    """Bytes of reduced gradients on one rank's device: its chunk of each reduced bucket, at stage 1 all
    of it; those that go to the host do not count.
    """
    return sum(
        reduced_numel(plan.buckets[number], planned.stage)
        * plan.buckets[number].torch_dtype.itemsize
        for graph in planned.graphs
        for plan in graph.plans
        for number in {s.bucket for s in plan.steps if s.kind is StepKind.REDUCE_SCATTER_START}
        if not is_evicted(plan.buckets[number], planned.stage)
    )


def _show_document(console: Console, shown: Document, most: int) -> None:
    for plan in shown.plans:
        long = len(plan.steps) > (most or len(plan.steps))
        console.print(buckets_table(plan), summary(plan))
        if not long:
            console.print(steps_table(plan))
    for timeline in shown.timelines:
        console.print(tables.steps(timeline, most or None), tables.summary(timeline))
    for name, value in shown.facts.items():
        console.print(f"{name}: {value}", highlight=False)


def _explain(console: Console, planned: Preview, bucket: int) -> None:
    found = [(graph, explain(graph.scheduled, bucket)) for graph in planned.graphs]
    if not any(lines for _, lines in found):
        have = ", ".join(f"{g.name} has buckets {_numbers(g)}" for g in planned.graphs)
        raise OptionError(f"--why {bucket}: no graph moves a bucket {bucket}; {have}")
    for graph, lines in found:
        if lines:
            names = ", ".join(slot.name for slot in graph.plans[0].buckets[bucket].slots[:4])
            console.print(f"{graph.name}, bucket {bucket} ({names}):", highlight=False)
        for line in lines:
            console.print(f"  {line}", highlight=False)


def _numbers(graph: GraphPreview) -> str:
    last = len(graph.plans[0].buckets) - 1
    return "0" if last == 0 else f"0 to {last}"


def _compare(console: Console, targets: Sequence[str]) -> None:
    if len(targets) != 2:
        raise OptionError(f"--diff compares two JSON files, got {len(targets)}")
    one, two = (document.read(Path(target)) for target in targets)
    if not one.timelines or not two.timelines:
        raise OptionError("--diff needs files with timelines, as --json writes them")
    for a, b in zip(one.timelines, two.timelines, strict=False):
        console.print(diff.diff(a, b))


def _merged(documents: Sequence[Document]) -> Document:
    return Document(
        ", ".join(d.title for d in documents),
        {name: value for d in documents for name, value in d.facts.items()},
        tuple(plan for d in documents for plan in d.plans),
        tuple(timeline for d in documents for timeline in d.timelines),
    )


def _code(planned: Preview) -> str:
    return "\n\n".join(
        f"# {graph.name}.{phase}\n{text}"
        for graph in planned.graphs
        for phase, text in graph.code.items()
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
