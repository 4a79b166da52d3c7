"""Models on the meta device that get their values, initialised or from checkpoints, a part a rank."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import ranks
import zero_compile
from initialised import differing, logits, make, tokens
from training import mine
from zero_compile.construction import safetensors
from zero_compile.construction.safetensors import tensors_at
from zero_runtime.errors import DivergenceError, OptionError, UnsupportedError, ZeroError
from zero_runtime.session import session_of


class Resets(nn.Module):
    """Modules that can initialise themselves, parameters tied, buffers among them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=1)
        self.body = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.recurrent = nn.GRU(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x.flatten())))  # type: ignore[no-any-return]


def _on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return Resets() if name == "resets" else make(name)


def _plain(name: str) -> nn.Module:
    torch.manual_seed(3)
    return Resets() if name == "resets" else make(name)


def _whole(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.untyped_storage().nbytes()]


# ------------------------------------------------------------------------------ initialised


def _initialised() -> list[Any]:
    model, plain = _on_meta("resets"), _plain("resets")
    torch.manual_seed(3)
    keys = zero_compile.materialize(model)
    assert model.head.weight is model.embed.weight
    assert not model.frozen.weight.requires_grad
    # the head draws before it is tied, in the plain model, so what follows it differs
    return [list(keys), _whole(model), [n for n in differing(plain, model) if "frozen" not in n]]


@pytest.mark.parametrize("size", [1, 2])
def test_modules_initialise_themselves_as_in_plain_construction(size: int) -> None:
    for keys, whole, differ in ranks.run(size, _initialised):
        assert keys == [[], []]
        assert not whole
        assert not differ


def _by_function(name: str) -> bool:
    """As ``model.apply(init)`` on a plain model."""
    plain, model = _plain(name), _on_meta(name)
    init = type(plain)._init_weights
    torch.manual_seed(5)
    with torch.no_grad():
        plain.apply(lambda module: init(plain, module))
    torch.manual_seed(5)
    zero_compile.materialize(model, init=lambda module: init(model, module))
    return not differing(plain, model) and not _whole(model)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_function_initialises_each_module(name: str) -> None:
    assert ranks.run(2, _by_function, name) == [True, True]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 4))
        self.register_buffer("table", torch.arange(5.0), persistent=False)


def test_what_nobody_initialises_is_an_error() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare())
    with pytest.raises(ZeroError, match=r"1\.weight, 1\.table: neither initialised nor loaded"):
        zero_compile.materialize(model)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare())

    def init(module: nn.Module) -> None:
        for tensor in [*module.parameters(False), *module.buffers(False)]:
            tensor.fill_(2.0)

    zero_compile.materialize(model, init)
    assert all(bool((v == 2.0).all()) for v in model.state_dict().values())
    assert bool((model[1].table == 2.0).all())


def test_what_has_values_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    expected = model[0].weight.detach().clone()
    zero_compile.materialize(model)
    assert torch.equal(model[0].weight, expected)
    assert not _whole(model)


# ------------------------------------------------------------------------------ checkpoints


def _save(folder: str, form: str, name: str) -> str:
    """The plain model on disk, in one of the forms in which checkpoints come."""
    plain, path = _plain(name), Path(folder)
    if dist.get_rank() == 0:
        if form == "pretrained":
            plain.save_pretrained(folder, max_shard_size="4KB")  # type: ignore[operator]
        else:
            state = {k: v.contiguous() for k, v in plain.state_dict().items() if k != "head.weight"}
            save_file(state, path / "model.safetensors")
    dist.barrier()
    return folder if form != "file" else str(path / "model.safetensors")


def _loaded(folder: str, form: str, name: str, dtype: torch.dtype) -> dict[str, Any]:
    where = _save(folder, form, name)
    plain, model = _plain(name).to(dtype), _on_meta(name).to(dtype)
    init = getattr(model, "_init_weights", None)  # for buffers that no checkpoint holds
    keys = zero_compile.materialize(model, init, checkpoint=where)
    facts = {"keys": list(keys), "whole": _whole(model), "differ": differing(plain, model)}
    step = torch.compile(model, backend="zero3")
    out, expected = logits(step(tokens() % 20)), logits(plain(tokens() % 20))
    facts["logits"] = torch.allclose(out, expected, atol=1e-5 if dtype is torch.float32 else 0.2)
    return facts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name", "dtype"),
    [
        ("file", "resets", torch.float32),
        ("folder", "resets", torch.bfloat16),
        ("pretrained", "gpt2", torch.float32),
        ("pretrained", "llama", torch.float32),
    ],
)
def test_checkpoints_are_loaded_into_shards(
    tmp_path: Path, form: str, name: str, dtype: torch.dtype
) -> None:
    for facts in ranks.run(2, _loaded, str(tmp_path), form, name, dtype):
        assert facts == {"keys": [[], []], "whole": [], "differ": [], "logits": True}


def _bytes_read(folder: str) -> float:
    """Bytes that this rank reads, as a share of those that there are."""
    path = Path(folder) / "model.safetensors"
    if dist.get_rank() == 0:
        save_file({f"{n}.weight": torch.randn(256, 512) for n in range(4)}, path)
    dist.barrier()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 256, bias=False) for _ in range(4)))
    read, original = 0, safetensors.os.preadv

    def counting(*args: Any) -> int:
        nonlocal read
        read += (got := original(*args))
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors.os, "preadv", counting)
        zero_compile.materialize(model, checkpoint=path)
    return read / (4 * 4 * 256 * 512)


def test_each_rank_reads_its_own_elements_only(tmp_path: Path) -> None:
    for share in ranks.run(2, _bytes_read, str(tmp_path)):
        assert 0.5 <= share < 0.52


def _strides(folder: str) -> list[str]:
    """A parameter that does not lie row by row."""
    path = Path(folder) / "model.safetensors"
    if dist.get_rank() == 0:
        save_file({"weight": torch.randn(8, 3, 3, 3), "bias": torch.randn(8)}, path)
    dist.barrier()
    with torch.device("meta"):
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    zero_compile.materialize(model, checkpoint=path)
    plain = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    plain.load_state_dict({n: _whole_of(t) for n, t in tensors_at(path).items()})
    return differing(plain, model)


def _whole_of(stored: safetensors.Stored) -> torch.Tensor:
    whole = torch.empty(stored.numel, dtype=stored.dtype)
    stored.read_into(whole)
    return whole.view(stored.shape)


def test_parameters_that_lie_otherwise_are_loaded_too(tmp_path: Path) -> None:
    assert ranks.run(2, _strides, str(tmp_path)) == [[], []]


def _trained(folder: str, fresh: bool, options: dict[str, Any]) -> list[float]:
    torch._dynamo.reset()
    where = _save(folder, "file", "resets")
    model: Any = _on_meta("resets") if fresh else _plain("resets")
    if fresh:
        zero_compile.materialize(model, checkpoint=where, options=options)
    step = torch.compile(model, backend="zero3", options=options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        (batch,) = mine((tokens()[:, 0] % 20,))
        step(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(v.double().abs().sum()) for v in model.state_dict().values()]


def _trained_both_ways(folder: str, options: dict[str, Any]) -> list[Any]:
    options = {k: folder if v == "folder" else v for k, v in options.items()}
    return [_trained(folder, fresh, options) for fresh in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"offload_param": {"device": "nvme"}, "nvme_path": "folder"}],
    ids=["memory", "nvme"],
)
def test_training_afterwards_is_the_same_bit_for_bit(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    for plain, built in ranks.run(2, _trained_both_ways, str(tmp_path), options):
        assert plain == built


def _different_files(folder: str) -> str:
    torch.manual_seed(dist.get_rank())
    path = Path(folder) / f"{dist.get_rank()}.safetensors"
    save_file({"weight": torch.randn(4, 4), "bias": torch.zeros(4)}, path)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    zero_compile.materialize(model, checkpoint=path)
    try:
        torch.compile(model, backend="zero3")(torch.ones(1, 4))
    except DivergenceError as error:
        return str(error)
    return ""


def test_ranks_that_loaded_different_files_are_told_so(tmp_path: Path) -> None:
    for message in ranks.run(2, _different_files, str(tmp_path)):
        assert "weight of initial bits" in message


# ------------------------------------------------------------------------------ what does not fit


def _linear(folder: Path, **tensors: torch.Tensor) -> tuple[nn.Module, Path]:
    path = folder / "model.safetensors"
    save_file(tensors, path)
    with torch.device("meta"):
        return nn.Linear(3, 2), path


def test_missing_and_unexpected_keys_are_reported_as_by_load_state_dict(tmp_path: Path) -> None:
    model, path = _linear(tmp_path, weight=torch.ones(2, 3), wieght=torch.ones(2))
    with pytest.raises(RuntimeError) as ours:
        zero_compile.materialize(model, checkpoint=path)
    assert model.weight.is_meta
    with pytest.raises(RuntimeError) as theirs:
        nn.Linear(3, 2).load_state_dict({"weight": torch.ones(2, 3), "wieght": torch.ones(2)})
    ours_keys, theirs_keys = (
        sorted(line.strip().rstrip(" .") for line in str(e.value).splitlines())
        for e in (ours, theirs)
    )
    assert ours_keys == theirs_keys
    keys = zero_compile.materialize(model, checkpoint=path, strict=False)
    assert keys == (["bias"], ["wieght"])
    assert torch.equal(model.weight, torch.ones(2, 3))
    assert bool((model.bias.detach().abs() > 0).any())  # initialised by the module


def test_shapes_that_differ_are_an_error_even_if_not_strict(tmp_path: Path) -> None:
    model, path = _linear(tmp_path, weight=torch.ones(3, 2), bias=torch.ones(2))
    with pytest.raises(
        ZeroError, match=r"size mismatch for weight: .*\[3, 2\], the model \[2, 3\]"
    ):
        zero_compile.materialize(model, checkpoint=path, strict=False)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no such checkpoint"):
        tensors_at(tmp_path / "nothing.safetensors")
    with pytest.raises(OptionError, match="holds no"):
        tensors_at(tmp_path)
    broken = tmp_path / "broken.safetensors"
    for content in (b"", b"\xff" * 20, (9).to_bytes(8, "little") + b"no json {"):
        broken.write_bytes(content)
        with pytest.raises(OptionError, match="no safetensors file"):
            tensors_at(broken)
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.ones(2)}, tmp_path / "part.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}))
    with pytest.raises(OptionError, match="lacks b"):
        tensors_at(tmp_path)


def test_a_file_that_is_cut_short_is_told(tmp_path: Path) -> None:
    model, path = _linear(tmp_path, weight=torch.ones(2, 3), bias=torch.ones(2))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ZeroError, match="cut short"):
        zero_compile.materialize(model, checkpoint=path)


def test_a_compiled_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    torch.compile(model, backend="zero3")(torch.ones(1, 2))
    with pytest.raises(UnsupportedError, match="before its first forward"):
        zero_compile.materialize(model)
    with pytest.raises(OptionError, match="init"):
        zero_compile.materialize(nn.Linear(2, 2), init=3)  # type: ignore[arg-type]


def test_materialising_inside_init_shares_its_session() -> None:
    with zero_compile.Init():
        first = nn.Linear(2, 2)
        with torch.device("meta"):
            second = nn.Linear(2, 2)
    model = nn.Sequential(first, second)
    zero_compile.materialize(model)
    assert session_of(model[0].weight) is session_of(model[1].weight)


# ------------------------------------------------------------------------------ memory

_PEAK = """
    import torch, zero_compile
    from bench.memory import peak_bytes
    from safetensors.torch import save_file
    from torch import nn
    from graphs import fake_world

    def model(layers):
        with torch.device("meta"):
            return nn.Sequential(*[nn.Linear(2048, 1024, bias=False) for _ in range(layers)])  # 8 MiB

    with fake_world(8):
        zero_compile.materialize(model(1), checkpoint="{path}", strict=False)
        before = peak_bytes()
        big = model(16)
        zero_compile.materialize(big, checkpoint="{path}")
        print((peak_bytes() - before) / (1 << 20))
"""


def test_loading_holds_no_whole_parameter(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"{n}.weight": torch.zeros(1024, 2048) for n in range(16)}, path)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PEAK.format(path=path))],
        env={
            "PYTHONPATH": f"{root}:{root / 'runtime'}:{root / 'tests' / 'support'}",
            "PATH": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout.splitlines()[-1]) < 16 + 6
