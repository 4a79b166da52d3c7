"""Models built partitioned: equal to those built whole, and never whole."""

import copy
import json
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zero_compile
from initialised import MODELS, EveryInit, differing, logits, make, tokens
from storages import live_storages
from training import mine
from zero_runtime.eager.sharded_parameter import ShardedParameter
from zero_runtime.errors import DivergenceError, GroupError, OptionError, UnsupportedError
from zero_runtime.ir.plan import Tier
from zero_runtime.session import session_of

SIZES = pytest.mark.parametrize("size", [1, 2])


def _whole(model: nn.Module) -> list[str]:
    """Parameters that this rank holds whole."""
    return [
        name
        for name, p in model.named_parameters()
        if p.numel() and (session_of(p) is None or p.untyped_storage().nbytes())
    ]


# ------------------------------------------------------------------------------ equal values


def _built(name: str) -> dict[str, Any]:
    plain = make(name)
    stream = torch.random.get_rng_state()
    with zero_compile.Init():
        model = make(name)
    same_stream = torch.equal(stream, torch.random.get_rng_state())
    return {"whole": _whole(model), "differ": differing(plain, model), "stream": same_stream}


@pytest.mark.slow
@SIZES
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_plain_construction_bit_for_bit(size: int, name: str) -> None:
    for found in ranks.run(size, _built, name):
        assert found == {"whole": [], "differ": [], "stream": True}


def _trained(name: str, inside: bool, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    torch._dynamo.reset()
    with zero_compile.Init(options=options, enabled=inside):
        model = make(name)
    step = torch.compile(model, backend="zero3", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        (batch,) = mine((tokens(),))
        loss = nn.functional.cross_entropy(
            logits(step(batch))[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, [float(v.double().abs().sum()) for v in model.state_dict().values()]


def _trained_both_ways(name: str, options: dict[str, Any]) -> list[Any]:
    return [_trained(name, inside, options) for inside in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), [(1, "llama"), (2, "gpt2"), (2, "mixture")])
def test_training_afterwards_is_the_same_bit_for_bit(size: int, name: str) -> None:
    for plain, built in ranks.run(size, _trained_both_ways, name, {}):
        assert plain == built


@pytest.mark.parametrize(
    "options",
    [{"tile_bytes": 1024}, {"reduce_dtype": "bfloat16"}, {"leaf_modules": ["norm"]}],
    ids=str,
)
def test_training_afterwards_is_the_same_with_options(options: dict[str, Any]) -> None:
    for plain, built in ranks.run(2, _trained_both_ways, "mixture", options):
        assert plain == built


# ------------------------------------------------------------------------------ memory

_PEAK = """
    import gc, torch, zero_compile
    from bench.memory import peak_bytes
    from torch import nn
    from graphs import fake_world

    MIB = 1 << 20

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(1024, 2048))  # 8 MiB
            nn.init.normal_(self.weight)
            nn.init.trunc_normal_(self.weight, std=0.02)
            self.weight.data.mul_(0.5)

    with fake_world({world}):
        with zero_compile.Init(enabled={enabled}):
            Layer()  # whatever the first one loads is not counted
        gc.collect()
        before = peak_bytes()
        with zero_compile.Init(enabled={enabled}):
            model = nn.Sequential(*[Layer() for _ in range(16)])
        print((peak_bytes() - before) / MIB)
"""


def _peak(world: int, enabled: bool) -> float:
    """MiB by which 16 parameters of 8 MiB raise the peak of a process."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PEAK.format(world=world, enabled=enabled))],
        env={
            "PYTHONPATH": f"{root}:{root / 'runtime'}:{root / 'tests' / 'support'}",
            "PATH": "",
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
            "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_no_rank_holds_more_than_its_part_and_about_one_whole_parameter() -> None:
    whole = _peak(8, enabled=False)
    assert whole > 110  # 15 further parameters; the first one's memory is used again
    assert _peak(8, enabled=True) < 16 + 12


def _held_while_building() -> list[int]:
    """Bytes of tensors that are alive after each layer, beside the shards."""
    held = []
    with zero_compile.Init():
        layers = []
        for _ in range(6):
            layers.append(nn.Linear(256, 256))
            alive = live_storages(lambda t: t.numel() == 256 * 256)
            held.append(sum(alive.values()))
    return held


def test_whole_parameters_do_not_pile_up() -> None:
    for held in ranks.run(2, _held_while_building):
        assert max(held) <= 2 * 256 * 256 * 4, held


# ------------------------------------------------------------------------------ transformers


def _saved_and_loaded(folder: str, kind: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    rank = torch.distributed.get_rank()
    plain = make(kind)
    if rank == 0:
        plain.save_pretrained(folder)  # type: ignore[operator]
    torch.distributed.barrier()
    with zero_compile.Init():
        model = AutoModelForCausalLM.from_pretrained(folder)
    whole = _whole(model)
    facts = {"whole": whole, "differ": differing(plain, model)}
    out = logits(torch.compile(model, backend="zero3")(tokens()))
    facts["logits"] = float((out - logits(plain(tokens()))).abs().max()) < 1e-5
    facts["tied"] = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return facts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_from_pretrained_loads_into_shards(tmp_path: Path, kind: str) -> None:
    for facts in ranks.run(2, _saved_and_loaded, str(tmp_path), kind):
        assert facts == {"whole": [], "differ": [], "logits": True, "tied": True}


# ------------------------------------------------------------------------------ what code does


def _changed_afterwards() -> dict[str, bool]:
    """Outside the block and before the first graph, code may go on."""
    plain, facts = EveryInit(), {}
    torch.manual_seed(0)
    plain = EveryInit()
    torch.manual_seed(0)
    with zero_compile.Init():
        model = EveryInit()
    for m in (plain, model):
        m.written.data.add_(1.0)
        with torch.no_grad():
            m.normal_.copy_(m.uniform_)
            m.normal_.copy_(m.normal_ * 2)
    facts["changed"] = not differing(plain, model)
    model.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    plain.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    facts["loaded"] = not differing(plain, model)
    alias = model.ones_.data
    with torch.no_grad():
        model.ones_.fill_(3.0)
        model.zeros_.fill_(1.0)
        model.ones_.mul_(2.0)
    facts["alias"] = bool((alias == 6.0).all())
    alias.fill_(9.0)
    facts["written by alias"] = bool((model.ones_ == 9.0).all())
    before = model.normal_.detach().clone()
    with pytest.raises(RuntimeError):
        model.normal_.data.copy_(torch.ones(5, 5))
    with pytest.raises(RuntimeError), torch.no_grad():
        model.normal_.copy_(torch.ones(5, 5))
    facts["failed write"] = torch.equal(model.normal_, before)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        model.normal_.mul_(2)
    return facts


def test_parameters_can_be_changed_until_the_first_graph() -> None:
    for facts in ranks.run(2, _changed_afterwards):
        assert all(facts.values()), facts


def _converted() -> list[str]:
    with zero_compile.Init():
        model = make("mixture").bfloat16()
        model.head.weight.data = torch.ones(60, 16)
    plain = make("mixture").bfloat16()
    plain.head.weight.data = torch.ones(60, 16)
    assert model.head.weight is model.embed.weight
    return [*_whole(model), *differing(plain, model)]


def test_conversion_and_new_shapes_partition_anew() -> None:
    assert ranks.run(2, _converted) == [[], []]


def _cast() -> list[str]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(1)
        plain = nn.Linear(9, 7)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(1)
    with zero_compile.Init(dtype=torch.bfloat16):
        model = nn.Linear(9, 7)
        frozen = nn.Parameter(torch.arange(3), requires_grad=False)
        model.numbers = frozen
    assert model.numbers is frozen
    assert model.numbers.dtype is torch.int64
    del model.numbers
    return [*_whole(model), *differing(plain, model)]


def test_dtype_casts_parameters_as_they_are_registered() -> None:
    assert ranks.run(2, _cast) == [[], []]


def _existing() -> list[str]:
    plain, model = make("mixture"), make("mixture")
    zero_compile.Init(module=model)
    model.norm[0].weight.data.mul_(2.0)
    plain.norm[0].weight.data.mul_(2.0)
    return [*_whole(model), *differing(plain, model)]


def test_an_existing_module_is_partitioned_at_once() -> None:
    assert ranks.run(2, _existing) == [[], []]


def _copied() -> dict[str, bool]:
    with zero_compile.Init():
        model = nn.Linear(4, 4)
        inside = copy.deepcopy(model)
    outside = copy.deepcopy(model)
    return {
        "inside": not _whole(inside),
        "outside": len(_whole(outside)) == 2,
        "equal": not differing(model, inside) and not differing(model, outside),
    }


def test_copies_are_partitioned_inside_the_block_only() -> None:
    for facts in ranks.run(2, _copied):
        assert all(facts.values()), facts


def test_what_is_not_registered_is_partitioned_at_the_end() -> None:
    with zero_compile.Init():
        model = torch.nn.utils.skip_init(nn.Linear, 4, 5)
        outer = nn.Sequential(model, nn.ReLU())
        outer[0]._parameters["bias"] = nn.Parameter(torch.ones(5))
    assert isinstance(outer[0].weight, ShardedParameter)
    assert torch.equal(outer[0].bias, torch.ones(5))
    assert not _whole(outer)


def test_meta_parameters_and_lazy_modules_are_left_alone() -> None:
    with zero_compile.Init():
        with torch.device("meta"):
            meta = nn.Linear(4, 5)
        lazy = nn.LazyLinear(3)
    assert meta.weight.is_meta
    assert type(meta.weight) is nn.Parameter
    lazy(torch.ones(2, 4))
    assert torch.compile(lazy, backend="zero3")(torch.ones(2, 4)).shape == (2, 3)


# ------------------------------------------------------------------------------ blocks


def test_of_nested_blocks_the_innermost_counts() -> None:
    with zero_compile.Init() as outer:
        first = nn.Linear(3, 3)
        with zero_compile.Init(enabled=False):
            plain = nn.Linear(3, 3)
        with zero_compile.Init(dtype=torch.bfloat16) as inner:
            second = nn.Linear(3, 3)
        third = nn.Linear(3, 3)
    after = nn.Linear(3, 3)
    assert outer is not inner
    assert [type(m.weight) is nn.Parameter for m in (first, plain, second, third, after)] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert session_of(first.weight) is session_of(third.weight) is not session_of(second.weight)
    assert second.weight.dtype is torch.bfloat16


def test_a_block_can_be_entered_again_also_after_a_graph() -> None:
    init = zero_compile.Init()
    with init:
        first = nn.Linear(3, 3)
    with init, init:
        second = nn.Linear(3, 3)
    assert session_of(first.weight) is session_of(second.weight)
    torch.compile(first, backend="zero3")(torch.ones(1, 3))
    with init:
        third = nn.Linear(3, 3)
        third.weight.data.fill_(2.0)
    assert bool((third.weight == 2.0).all())
    assert session_of(third.weight) is not session_of(first.weight)


def _joined() -> float:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(2, 2))
    torch.manual_seed(0)
    with zero_compile.Init():
        first = nn.Linear(4, 6)
        with zero_compile.Init():
            second = nn.Linear(6, 2)
    model = nn.Sequential(first, second, nn.Linear(2, 2))
    step = torch.compile(model, backend="zero3")
    step(torch.ones(3, 4)).sum().backward()
    plain(torch.ones(3, 4)).sum().backward()
    assert len({session_of(p) for p in model.parameters()}) == 1
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return max(
        float((a - b).abs().max())
        for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )


def test_parts_built_in_different_blocks_train_as_one_model() -> None:
    assert max(ranks.run(2, _joined)) < 1e-6


def test_an_exception_ends_the_block() -> None:
    inside = nn.Linear(2, 2)

    def build() -> None:
        with zero_compile.Init():
            inside.weight = nn.Parameter(torch.randn(2, 2))
            raise KeyError

    with pytest.raises(KeyError):
        build()
    assert type(nn.Linear(2, 2).weight) is nn.Parameter
    expected = inside.weight.detach().clone()
    out = torch.compile(inside, backend="zero3")(torch.eye(2))
    torch.testing.assert_close(out, expected.t() + inside.bias)


def test_replaced_parameters_are_let_go() -> None:
    with zero_compile.Init():
        model = make("gpt2")
        model.transformer.wte = nn.Embedding(70, 16)
        model.lm_head.weight = model.transformer.wte.weight
    session = session_of(model.lm_head.weight)
    assert session is not None
    assert len(session.entries) == len(session.buckets) == len(list(model.parameters()))


def test_the_first_graph_chooses_the_buckets_and_the_names() -> None:
    with zero_compile.Init():
        model = make("mixture")
    step = torch.compile(model, backend="zero3")
    step(tokens())
    session = session_of(model.head.weight)
    assert session is not None
    used = next(plan for plan in session.plans).buckets
    plain = make("mixture")
    other = torch.compile(plain, backend="zero3")
    other(tokens())
    assert [b.slots for b in zero_compile.plans(plain)[0].buckets] == [b.slots for b in used]
    names = {slot.name for bucket in session.buckets for slot in bucket.plan.slots}
    assert names == dict(model.named_parameters()).keys()
    with pytest.warns(UserWarning, match=r"^\.data uses a partitioned parameter"):
        assert torch.equal(model.head.weight.data, plain.head.weight.data)


# ------------------------------------------------------------------------------ disagreement


def _other_seed() -> str:
    with zero_compile.Init():
        torch.manual_seed(torch.distributed.get_rank())
        model = nn.Linear(4, 4)
        model.weight.data.mul_(0.5)
    try:
        torch.compile(model, backend="zero3")(torch.ones(1, 4))
    except DivergenceError as error:
        return str(error)
    return ""


def test_ranks_that_built_different_models_are_told_so() -> None:
    for message in ranks.run(2, _other_seed):
        assert "weight of initial bits" in message, message


def _eager_only(same: bool) -> str:
    """Parameters that no graph uses are compared before the first step."""
    with zero_compile.Init():
        torch.manual_seed(0 if same else torch.distributed.get_rank())
        model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    try:
        optimizer.step()
    except DivergenceError as error:
        return str(error)
    return ""


def test_parameters_that_no_graph_uses_are_compared_too() -> None:
    assert ranks.run(2, _eager_only, True) == ["", ""]
    for message in ranks.run(2, _eager_only, False):
        assert "Linear.weight of initial bits" in message or "weight of initial" in message


# ------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"remote_device": "disk"}, OptionError, "remote_device 'disk'"),
        ({"remote_device": "nvme"}, OptionError, "nvme_path"),
        ({"dtype": torch.int32}, OptionError, "floating point"),
        ({"zero_quantized_weights": True}, UnsupportedError, "zero_quantized_weights"),
        (
            {"zero_param_parallel_group": "of another program"},
            UnsupportedError,
            "mesh of two dimensions",
        ),
        ({"config": {"zero_optimization": {"stage": 2}}}, UnsupportedError, "stage 2"),
        ({"config": {}, "config_dict_or_path": {}}, OptionError, "give one of them"),
        ({"config": "/nowhere.json"}, OptionError, "/nowhere.json"),
        ({"options": {"bucket_byte": 1}}, OptionError, "bucket_bytes"),
        ({"options": {"host_memory": "1GiB"}}, OptionError, "offload_param"),
        ({"data_parallel_group": 3}, OptionError, "ProcessGroup"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), zero_compile.Init(**arguments):
        pass


def test_what_has_nothing_to_do_here_is_said() -> None:
    with pytest.warns(UserWarning, match="mem_efficient_linear"):
        zero_compile.Init(mem_efficient_linear=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero_compile.Init(mem_efficient_linear=True, zero_quantized_weights=True, enabled=False)


def test_several_ranks_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GroupError, match="init_process_group"), zero_compile.Init():
        pass


def _placed(make_init: Callable[[str], Any], folder: str, options: dict[str, Any]) -> list[Any]:
    options = {k: folder if v == "folder" else v for k, v in options.items()}
    with make_init(folder):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    session = session_of(model[0].weight)
    assert session is not None
    tiers = {bucket.plan.residence.parameters for bucket in session.buckets}
    differ = differing(plain, model)
    step = torch.compile(model, backend="zero3", options=options)
    step(torch.ones(2, 8)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    tiers |= {bucket.plan.residence.parameters for bucket in session.buckets}
    return [tiers, differ, session.memory_tiers.swapped_bytes > 0]


def _remote_cpu(folder: str) -> Any:
    return zero_compile.Init(remote_device="cpu", pin_memory=True)


def _remote_nvme(folder: str) -> Any:
    section = {"device": "nvme", "nvme_path": folder}
    return zero_compile.Init(config={"zero_optimization": {"stage": 3, "offload_param": section}})


def _from_file(folder: str) -> Any:
    path = Path(folder) / f"config{torch.distributed.get_rank()}.json"
    zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": "auto"}}
    path.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    return zero_compile.Init(config_dict_or_path=path)


@pytest.mark.parametrize(
    ("make_init", "options", "tier"),
    [
        (_remote_cpu, {"offload_param": {"device": "cpu"}}, Tier.HOST),
        (_from_file, {"offload_param": {"device": "cpu"}}, Tier.HOST),
        (_remote_nvme, {"offload_param": {"device": "nvme"}, "nvme_path": "folder"}, Tier.NVME),
    ],
)
def test_parameters_are_born_where_they_live(
    tmp_path: Path, make_init: Callable[[str], Any], options: dict[str, Any], tier: Tier
) -> None:
    for tiers, differ, swapped in ranks.run(2, _placed, make_init, str(tmp_path), options):
        assert tiers == {tier}
        assert not differ
        assert swapped is (tier is Tier.NVME)


def test_another_way_to_partition_is_refused_when_the_model_is_compiled() -> None:
    with zero_compile.Init(remote_device="cpu"):
        model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="what is offloaded"):
        torch.compile(model, backend="zero3")(torch.ones(1, 2))
