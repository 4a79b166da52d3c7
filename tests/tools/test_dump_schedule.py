"""The tool that shows schedules, through its command line."""

import json
import re
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

import zero_compile
from tools import document
from tools.dump_schedule import main
from zero_runtime.ir.plan import Plan, Residence, Tier

SCRIPT = """
import torch
from torch import nn

def make(batch, dtype):
    layers = [nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(3)]
    return nn.Sequential(*layers), (torch.randn(batch, 64, dtype=dtype),)

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x):
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.two(x)

def two():
    return Two(), (torch.randn(4, 8),)
"""
GPT = "hf:gpt2,n_layer=1,n_embd=32,n_head=2,vocab_size=64"
APP = typer.Typer()
APP.command()(main)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(APP, [str(a) for a in arguments], env={"COLUMNS": "800"})


def shown(*arguments: object) -> str:
    found = run(*arguments)
    assert found.exit_code == 0, found.output
    return str(found.output)


def refused(*arguments: object) -> str:
    """The one line that says why; nothing else went wrong."""
    found = run(*arguments)
    assert found.exit_code == 1, found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert "Traceback" not in found.output
    lines = [line for line in found.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, found.output
    assert found.output.rstrip().endswith(lines[0].rstrip())
    return str(lines[0])


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "three_linears.py"
    path.write_text(SCRIPT)
    return f"{path}:make"


SMALL = ("--option", "bucket_bytes=1", "--world-size", 4)

# ------------------------------------------------------------------------------ what is shown


def test_a_written_plan_is_shown_step_by_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    torch.compile(model, backend="zero3")(torch.ones(1, 4)).sum().backward()
    files = []
    for plan in zero_compile.plans(model):
        files.append(tmp_path / f"{plan.name}.json")
        files[-1].write_text(plan.to_json())
    output = shown(*files)
    for word in (
        "forward",
        "backward",
        "all_gather_start",
        "release",
        "reduce_scatter_wait",
        "0.weight",
    ):
        assert word in output


def test_a_script_is_planned(script: str) -> None:
    output = shown(script, *SMALL, "--batch", 32)
    for text in (
        "graph0.forward: buckets over 4 ranks",
        "graph0: predicted, 4 ranks",
        "overlap efficiency",
        "three_linears.py:make, 12,288 parameters",
        "ranks: 4, stage 3",
        "input: 32 x 1024 tokens a rank, torch.float32",
        "hardware: h100",
        "parameter shards: 12.0 KiB",
        "gradient shards: 12.0 KiB",
        "optimizer state: 24.0 KiB",
    ):
        assert text in output, text
    assert re.search(r"planned in \d+\.\d s", output)


@pytest.mark.parametrize(
    ("stage", "shards", "gradients"),
    [(1, "24.0", "24.0"), (2, "24.0", "6.00"), (3, "6.00", "6.00")],
)
def test_the_facts_of_each_stage(script: str, stage: int, shards: str, gradients: str) -> None:
    output = shown(script, *SMALL, "--stage", stage, "--dtype", "bfloat16", "--masters")
    assert f"parameter shards: {shards} KiB" in output
    assert f"gradient shards: {gradients} KiB" in output
    assert "optimizer state: 36.0 KiB" in output
    assert f"ranks: 4, stage {stage}" in output


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("schedule", ["planned", "one_ahead"])
def test_what_lives_off_the_device(script: str, tmp_path: Path, tier: Tier, schedule: str) -> None:
    nvme = tier is Tier.NVME
    section = json.dumps({"device": str(tier), **({"nvme_path": "/scratch"} if nvme else {})})
    away = [f"--option=offload_{kind}={section}" for kind in ("param", "optimizer")]
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "trace", "graph")}
    written = [part for name, path in files.items() for part in (f"--{name}", path)]
    output = shown(script, *SMALL, *away, "--schedule", schedule, "--why", 0, *written)
    for text in (
        "shards on",
        "optimizer on",
        "fetch_start",
        "evict",
        "host to device",
        "device to host",
        "parameter shards on the device: 0 B",
        "gradient shards on the device: 0 B",
        "optimizer state on the device: 0 B",
        "copied to the device from 0.",
        "goes to the host from",
    ):
        assert text in output, text
    for text in ("read_start", "nvme read", "read from NVMe from 0.000 ms"):
        assert (text in output) is nvme, text
    moved = re.search(r"moved a rank a step: (.*)", output)
    assert moved is not None
    assert moved[1].rstrip().endswith("device to host 12.0 KiB")
    made = document.read(files["json"])
    there = {bucket.residence for plan in made.plans for bucket in plan.buckets}
    assert there == {Residence(tier, tier)}
    lanes = {"host_to_device", "device_to_host"} | ({"nvme_read"} if nvme else set())
    channels = {e.channel for timeline in made.timelines for e in timeline.events}
    assert channels == {"compute", "all_gather", "reduce_scatter", *lanes}
    trace = json.loads(files["trace"].read_text())["traceEvents"]
    named = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert named == channels
    page = files["html"].read_text()
    assert all(f'"channel":"{lane}"' in page for lane in channels)
    assert "zero3.evict" in files["graph"].read_text()


def test_what_lives_on_the_device_has_no_column_for_it(script: str) -> None:
    output = shown(script, *SMALL)
    assert "shards on" not in output
    assert "moved a rank a step" not in output


def test_an_import_path(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(script.rpartition(":")[0]).parent))
    assert "three_linears:make, 12,288 parameters" in shown("three_linears:make", *SMALL)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "trace", "graph")}
    written = [part for name, path in files.items() for part in (f"--{name}", path)]
    output = shown(GPT, "--sequence", 16, "--world-size", 4, *written)
    assert "47,584 parameters" in output
    made = document.read(files["json"])
    assert made.facts["input"] == "1 x 16 tokens a rank, torch.float32"
    assert [p.name for p in made.plans] == ["graph0.forward", "graph0.backward"]
    assert made.timelines[0].world_size == 4
    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert {"all_gather", "compute"} <= {e.get("cat") for e in events} | {
        str(e.get("args", {}).get("name", "")).replace(" ", "_") for e in events
    }
    graph = files["graph"].read_text()
    assert "# graph0.forward" in graph
    assert "zero3.all_gather_start" in graph
    _check_page(files["html"].read_text(), made)


def _check_page(page: str, made: document.Document) -> None:
    assert page.lstrip().lower().startswith("<!doctype html>")
    for lane in ("all_gather", "reduce_scatter", "compute"):
        assert lane in page
    for name, value in made.facts.items():
        assert name in page
        assert value in page
    assert "addmm" in page


def test_only_as_many_steps_as_asked_for(script: str) -> None:
    few, all_of_them = (shown(script, *SMALL, "--most", n) for n in (3, 0))
    assert "more" in few
    assert len(all_of_them.splitlines()) > len(few.splitlines())


def test_inference(script: str) -> None:
    output = shown(script, *SMALL, "--infer")
    assert "graph0.inference" in output
    assert "reductions 0 B" in output


def test_settings_reach_the_planner(script: str) -> None:
    demand = shown(script, *SMALL, "--schedule", "on_demand", "--hardware", "a100")
    assert "steps (on_demand)" in demand
    assert "hardware: a100" in demand
    assert "overlap efficiency" in demand
    wide = ("--option", "reduce_dtype=float32", "--dtype", "bfloat16")
    assert "reductions 36.0 KiB" in shown(script, *SMALL, *wide)


# ------------------------------------------------------------------------------ questions


def test_why_a_bucket_is_where_it_is(script: str) -> None:
    output = shown(script, *SMALL, "--why", 1, "--why", 2)
    for text in (
        "graph0, bucket 1 (1.weight):",
        "graph0, bucket 2 (2.weight):",
        "gather of 16,384 bytes: starts before",
        "not later, because",
        "not earlier, because",
        "kept from forward to backward",
        "reduction of 16,384 bytes: starts after",
    ):
        assert text in output, text


def test_why_of_a_bucket_that_only_one_graph_has(script: str) -> None:
    target = script.replace(":make", ":two")
    output = shown(target, *SMALL, "--why", 2)
    assert re.search(r"^graph2, bucket 2 \(two\.1\.weight\):", output, re.MULTILINE)
    assert "graph0, bucket 2" not in output


def test_why_of_a_bucket_that_is_not_there(script: str) -> None:
    found = refused(script, *SMALL, "--why", 9)
    assert found == "error: --why 9: no graph moves a bucket 9; graph0 has buckets 0 to 2"


def test_the_formula(script: str) -> None:
    output = shown(script, *SMALL, "--formula")
    assert re.search(r"peak bytes a rank, stage 3: .*B.*/N", output)


def test_the_largest_batch(script: str) -> None:
    output = shown(script, *SMALL, "--largest-batch", "--device-memory", "200kB")
    found = re.search(r"largest batch a rank in 200kB: (\d+) x 1024 tokens", output)
    assert found is not None
    assert int(found[1]) > 1


def test_two_files_compared(script: str, tmp_path: Path) -> None:
    one, two = tmp_path / "planned.json", tmp_path / "demand.json"
    shown(script, *SMALL, "--json", one)
    shown(script, *SMALL, "--schedule", "on_demand", "--json", two)
    output = shown("--diff", one, two)
    assert "step time" in output
    assert "all gather of bucket" in output
    assert "later" in output
    same = shown("--diff", one, one)
    assert "later" not in same
    again = shown(one)
    assert "graph0: predicted, 4 ranks" in again
    page = tmp_path / "both.html"
    shown(one, two, "--html", page)
    assert "planned.json" in page.read_text() or "graph0" in page.read_text()


# ------------------------------------------------------------------------------ refusals


def test_a_budget_too_small_for_a_step(script: str) -> None:
    found = refused(script, *SMALL, "--device-memory", "90kB")
    assert re.search(r"^error: (bucket \d does not fit at )?node \d+ \(mm_\d\)", found)
    assert re.search(r" \d+ bytes .*, \d+ more than the limit of \d+; .* smaller batch$", found)


def test_a_budget_too_small_for_what_stays(script: str) -> None:
    assert refused(script, *SMALL, "--device-memory", "30kB") == (
        "error: device_memory of 30,000 bytes does not hold what stays on one rank: parameter shards "
        "12,288 bytes, gradient shards 0 bytes and optimizer state 24,576 bytes take 36,864 bytes, "
        "6,864 bytes too much. Use more ranks or a larger budget."
    )


def test_a_budget_too_small_for_one_sequence(script: str) -> None:
    found = refused(script, *SMALL, "--device-memory", "90kB", "--largest-batch")
    assert re.search(r"node \d+ \(mm_\d\).* \d+ more than the limit", found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hf:no-such-model",), "hf:no-such-model is no preset"),
        (("hf:gpt2,n_head=many",), "hf:gpt2 does not accept these overrides"),
        (("no_such_module:make",), "cannot import no_such_module"),
        (("nowhere/model.py:make",), "there is no file nowhere/model.py"),
        (("llama",), "'llama' names no model"),
        (("nowhere/plan.json",), "there is no file nowhere/plan.json"),
        (("a:b", "c:d"), "one model at a time, or JSON files only; got a:b, c:d"),
        (("--diff", "a.json"), "--diff compares two JSON files, got 1"),
        (("--diff", "a.json", "b.json"), "there is no file a.json"),
        (("a:b", "--option", "bucket_bytes"), "--option 'bucket_bytes': write name=value"),
        (("a:b", "--dtype", "float17"), "'float17' is not a torch dtype"),
        (("a:b", "--dtype", "int64"), "--dtype int64: parameters are floating-point numbers"),
    ],
)
def test_what_is_wrong_before_anything_is_planned(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--option", "bucket_byte=1"),
            "unknown option 'bucket_byte'. Did you mean 'bucket_bytes'",
        ),
        (("--option", "bucket_bytes=few"), "option 'bucket_bytes'"),
        (("--option", "verify=perhaps"), "option 'verify'"),
        (("--schedule", "never"), "option 'schedule'"),
        (("--hardware", "h1000"), "unknown hardware profile 'h1000'"),
        (("--hardware", "nowhere.json"), "cannot read hardware profile nowhere.json"),
        (("--device-memory", "plenty"), "'plenty' is not a size"),
        (("--largest-batch",), "--largest-batch needs --device-memory"),
        (("--json", "/nowhere/out.json"), "/nowhere/out.json"),
        (("--html", "/nowhere/out.html"), "/nowhere/out.html"),
        (("--trace", "/nowhere/out.json"), "/nowhere/out.json"),
        (("--graph", "/nowhere/out.txt"), "/nowhere/out.txt"),
    ],
)
def test_wrong_settings_of_a_model(script: str, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(script, *SMALL, *arguments)


@pytest.mark.parametrize("text", ["", "no json", "[1, 2]", '{"name": "x"}'])
def test_a_file_that_holds_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert "holds no schedule, plan or timeline" in refused(path)


def test_files_without_timelines(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    torch.compile(model, backend="zero3")(torch.ones(1, 4)).sum().backward()
    path = tmp_path / "plan.json"
    path.write_text(zero_compile.plans(model)[0].to_json())
    assert isinstance(Plan.from_json(path.read_text()), Plan)
    assert "--diff needs files with timelines" in refused("--diff", path, path)
    page = tmp_path / "page.html"
    assert "a page or a trace needs a timeline" in refused(path, "--html", page)
    assert not page.exists()
    assert "--graph needs a model" in refused(path, "--graph", tmp_path / "graph.txt")


@pytest.mark.parametrize("arguments", [("--stage", 4), ("--world-size", 0), ("--batch", 0)])
def test_figures_out_of_range_are_refused_by_their_names(
    script: str, arguments: tuple[str, int]
) -> None:
    found = run(script, *arguments)
    assert found.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in found.output
