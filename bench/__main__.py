"""`python -m bench`: contenders side by side; `python -m bench --compare solo`: one process."""

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from bench import launch, planning, solo, table
from bench.contenders import CONTENDERS, REFERENCE, ZERO3, Contender
from bench.model import parameter_count
from bench.settings import Settings

Report = Callable[[str], None]
Outcome = table.Measurement | str  # the measurement, or why there is none

SizeName = Literal["tiny", "30m", "120m"]


def measure(contender: Contender, settings: Settings, cache: Path, timeout: float) -> Outcome:
    """One contender, once, in fresh processes; its cache folder is its own from round to round."""
    if importlib.util.find_spec(contender.package) is None:
        return f"{contender.package} is not installed"
    environment = launch.common_environment(settings.malloc, cache / contender.name)
    arguments = ["bench.worker", contender.name, settings.to_json()]
    ranks = 0 if contender.single else settings.world
    try:
        result = launch.run(arguments, ranks=ranks, environment=environment, timeout=timeout)
    except launch.LaunchError as error:
        return str(error)
    return table.Measurement.from_json(result)


def interleave(
    names: Sequence[str], settings: Settings, rounds: int, timeout: float, report: Report
) -> dict[str, list[Outcome]]:
    """Round by round, so that a slow minute of the machine falls on all contenders."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        for index in range(rounds):
            for name in names:
                report(f"round {index + 1} of {rounds}: {name}")
                outcome = measure(CONTENDERS[name], settings, Path(cache), timeout)
                outcomes[name].append(outcome)
    return outcomes


def measured(outcomes: Sequence[Outcome]) -> list[table.Measurement]:
    return [outcome for outcome in outcomes if isinstance(outcome, table.Measurement)]


def failures(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    return tuple(
        f"round {index + 1}: {outcome}"
        for index, outcome in enumerate(outcomes)
        if isinstance(outcome, str)
    )


def to_rows(outcomes: dict[str, list[Outcome]], settings: Settings) -> list[table.Row]:
    references = measured(outcomes.get(REFERENCE, []))
    reference = references[0].losses if references else None
    rows = []
    for name, all_rounds in outcomes.items():
        rounds = measured(all_rounds)
        summary = None
        if rounds:
            summary = table.summarize(rounds, settings.tokens_per_step, reference)
        rows.append(table.Row(name, CONTENDERS[name].what, summary, failures(all_rounds)))
    return rows


def conditions(settings: Settings, rounds: int) -> str:
    count = parameter_count(settings.size, settings.seq) / 1e6
    return (
        f"{count:.1f}M parameters, {settings.dtype}, {settings.world} ranks x {settings.batch} "
        f"sequences x {settings.seq} tokens, {rounds} rounds x {settings.steps} steps, "
        f"one thread a process, malloc {settings.malloc}, "
        f"AdamW {'fused' if settings.fused else 'default'}, "
        f"torch {torch.__version__}, {os.cpu_count()} CPUs"
    )


def save(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2, default=asdict) + "\n")


def run_peers(
    console: Console, settings: Settings, names: Sequence[str], rounds: int, timeout: float
) -> dict[str, Any]:
    with console.status("starting") as status:
        outcomes = interleave(names, settings, rounds, timeout, status.update)
    rows = to_rows(outcomes, settings)
    everything = [outcome for rounds_of in outcomes.values() for outcome in measured(rounds_of)]
    console.print(table.render_rich(rows, ZERO3, conditions(settings, rounds)))
    print(f"\n{conditions(settings, rounds)}. {table.peak_note(everything)}\n")
    print(table.render_markdown(rows, ZERO3))
    return {"outcomes": outcomes, "rows": [row._asdict() for row in rows]}


def run_solo(console: Console, settings: Settings, rounds: int, timeout: float) -> dict[str, Any]:
    with console.status("steps taken in turns") as status:
        turns = solo.compare(settings, timeout)
        seconds = solo.compare_compilation(settings, rounds, timeout, status.update)
    summary = table.summarize_solo(turns)
    print(conditions(settings, rounds))
    for line in table.solo_lines(summary, seconds):
        print(f"- {line}")
    return {"turns": turns, "first_step_seconds": seconds, "summary": summary._asdict()}


def run_planning(console: Console) -> dict[str, Any]:
    with console.status("starting") as status:
        found = list(planning.compare(status.update))
    for line in planning.lines(found):
        print(line)
    return {"planning": [p._asdict() for p in found]}


def chosen(only: str) -> list[str]:
    names = [name.strip() for name in only.split(",") if name.strip()] or list(CONTENDERS)
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        known = ", ".join(CONTENDERS)
        raise typer.BadParameter(f"unknown contender {', '.join(unknown)}; known: {known}")
    return names


def main(
    compare: Annotated[
        Literal["peers", "solo", "planning"],
        typer.Option(help="contenders, world size 1 in one process, or the planner's own time"),
    ] = "peers",
    size: Annotated[SizeName, typer.Option(help="size of the model")] = "30m",
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="bf16: autocast, fp32 parameters")
    ] = "fp32",
    world: Annotated[int, typer.Option(min=1, help="ranks (solo: always 1)")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="sequences per rank")] = 4,
    seq: Annotated[int, typer.Option(min=2, help="tokens per sequence")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="timed steps")] = 8,
    warmup: Annotated[int, typer.Option(min=1, help="steps before them")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="times each contender is started")] = 3,
    only: Annotated[str, typer.Option(help="contenders, separated by commas")] = "",
    malloc: Annotated[
        Literal["default", "low"], typer.Option(help="low: return freed memory early")
    ] = "default",
    fused: Annotated[bool, typer.Option(help="AdamW(fused=True), for every contender")] = True,
    backend: Annotated[str, typer.Option(help="what the contender zero3 compiles with")] = "zero3",
    timeout: Annotated[float, typer.Option(help="seconds for one measurement")] = 600.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write everything here")] = None,
) -> None:
    """Compare ZeRO-3 as a torch.compile backend with its peers, on this machine's CPUs."""
    solo_mode = compare == "solo"
    settings = Settings(
        size=size,
        dtype=dtype,
        world=1 if solo_mode else world,
        batch=batch,
        seq=seq,
        steps=steps,
        warmup=warmup,
        fused=fused,
        malloc=malloc,
        backend=backend,
    )
    # Wide enough for the table also where output goes to a file.
    console = Console(width=max(Console().width, 120))
    if compare == "planning":
        found = run_planning(console)
    elif solo_mode:
        found = run_solo(console, settings, rounds, timeout)
    else:
        found = run_peers(console, settings, chosen(only), rounds, timeout)
    save(json_file, {"settings": settings, "rounds": rounds, **found})


if __name__ == "__main__":
    typer.run(main)
