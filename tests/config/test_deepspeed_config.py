"""DeepSpeed's JSON: every key is honoured, noted or refused, and mistakes are named."""

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_compile.api.report import sessions
from zero_compile.config.deepspeed.config import Config, notices, parse
from zero_compile.config.deepspeed.convert import backend_of, options_from, to_options
from zero_compile.config.deepspeed.keys import BY_NAME, KEYS, Key, Verdict, table
from zero_compile.config.options import parse as parse_options
from zero_compile.deepspeed.batch import Batch, resolve_batch
from zero_runtime.errors import OptionError, UnsupportedError

DOCS = Path(__file__).parents[2] / "docs" / "deepspeed.md"
BEGIN, END = "<!-- keys -->\n", "<!-- end of keys -->\n"


def nested(path: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for ``"a.b"``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = dict(first)
    for name, value in second.items():
        old = both.get(name)
        both[name] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return both


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of a model's fields, those of sections within it included."""
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        section = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if section is None:
            yield prefix + name
        else:
            yield from leaves(section, f"{prefix}{name}.")


def of(verdict: Verdict) -> list[str]:
    return [key.key for key in KEYS if key.verdict is verdict]


# ------------------------------------------------------------------------------ the table


def test_the_table_has_one_row_for_each_field_of_the_config() -> None:
    assert sorted(leaves(Config)) == sorted(key.key for key in KEYS)


def test_the_docs_hold_the_table() -> None:
    """EXPECTTEST_ACCEPT=1 rewrites it."""
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    found, after = rest.split(END)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        DOCS.write_text(f"{before}{BEGIN}{table()}{END}{after}")
    else:
        assert found == table()


# ------------------------------------------------------------------------------ honoured

#: Key, a value that is not the default, what else the config needs, and the option that shows it.
HONOURED: dict[str, tuple[Any, dict[str, Any], tuple[str, Any]]] = {
    "communication_data_type": ("fp32", {}, ("reduce_dtype", "float32")),
    "bf16.enabled": (True, {}, ("bf16", True)),
    "fp16.enabled": (True, {}, ("fp16", True)),
    "zero_optimization.reduce_bucket_size": (1e6, {}, ("reduce_bucket_size", 10**6)),
    "zero_optimization.overlap_comm": (False, {}, ("overlap_comm", False)),
    **{
        f"zero_optimization.stage3_{name}": (2e5, {}, (f"stage3_{name}", 2 * 10**5))
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
        )
    },
    "zero_optimization.leaf_module.classes": (
        ["some.module.Experts"],
        {},
        ("leaf_modules", ("Experts",)),
    ),
    "zero_optimization.leaf_module.names": (["up", "down"], {}, ("leaf_modules", ("up", "down"))),
    "zero_optimization.cpu_offload": (True, {}, ("offload_optimizer", {"device": "cpu"})),
    "zero_optimization.cpu_offload_param": (True, {}, ("offload_param", {"device": "cpu"})),
    "zero_optimization.cpu_offload_use_pin_memory": (
        False,
        {"zero_optimization": {"cpu_offload": True}},
        ("offload_optimizer", {"pin_memory": False, "device": "cpu"}),
    ),
    "compile.offload_activation": (True, {}, ("offload_activations", {"device": "cpu"})),
}
PASSED = {
    "zero_optimization.offload_param": {
        "device": "nvme",
        "nvme_path": "/scratch",
        "buffer_count": 3,
        "buffer_size": 10**6,
        "max_in_cpu": 0,
        "pin_memory": False,
    },
    "zero_optimization.offload_optimizer": {
        "device": "nvme",
        "nvme_path": "/scratch",
        "buffer_count": 6,
        "pin_memory": False,
        "pipeline_read": True,
        "pipeline_write": True,
        "fast_init": True,
        "ratio": 0.5,
        "super_offload": True,
        "cpuadam_cores_perc": 0.5,
    },
    "aio": {
        "block_size": 4096,
        "queue_depth": 2,
        "intra_op_parallelism": 3,
        "thread_count": 4,
        "single_submit": True,
        "overlap_events": False,
    },
}
#: Honoured, and shown by tests of their own below.
ELSEWHERE = {
    "zero_optimization.stage",
    "zero_optimization.leaf_module.name_suffixes",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.mics_shard_size",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
}


def test_every_honoured_key_is_shown_to_change_the_options() -> None:
    passed = {f"{section}.{key}" for section, keys in PASSED.items() for key in keys}
    assert {*HONOURED, *passed, *ELSEWHERE} == set(of(Verdict.HONOURED))


@pytest.mark.parametrize("key", HONOURED)
def test_an_honoured_key_becomes_its_option(key: str) -> None:
    value, beside, (option, expected) = HONOURED[key]
    options = to_options(parse(merged(beside, nested(key, value))), 1)
    assert options[option] == expected
    assert to_options(parse(beside), 1).get(option) != expected


@pytest.mark.parametrize("section", PASSED)
def test_offload_sections_are_passed_on_as_written(section: str) -> None:
    option = section.rpartition(".")[2]
    whole = to_options(parse(nested(section, PASSED[section])), 1)
    assert whole == {option: PASSED[section]}
    for key, value in PASSED[section].items():
        assert to_options(parse(nested(section, {key: value})), 1) == {option: {key: value}}


def test_nothing_given_gives_no_options() -> None:
    assert to_options(parse({}), 1) == {}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_stage_is_the_backend(stage: int) -> None:
    assert backend_of(parse({"zero_optimization": {"stage": stage}})) == f"zero{stage}"


def test_stage_0_is_refused_with_advice() -> None:
    with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
        backend_of(parse({}))


def test_bfloat16_masters_are_no_masters() -> None:
    both = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert to_options(parse({"bf16": {"enabled": True, **both}}), 1) == {}
    for key in both:
        with pytest.raises(UnsupportedError, match="must be the same"):
            parse({"bf16": {"enabled": True, key: True}})


def test_ends_of_names_choose_leaves_of_the_model() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    config = parse({"zero_optimization": {"leaf_module": {"name_suffixes": ["0.1", "1"]}}})
    assert to_options(config, 1, model=model)["leaf_modules"] == ("0.1", "0.1", "1")
    with pytest.raises(OptionError, match=r"leaf_module\.names"):
        to_options(config, 1)
    other = parse({"zero_optimization": {"leaf_module": {"name_suffixes": ["expert"]}}})
    with pytest.raises(OptionError, match="ends in 'expert'"):
        to_options(other, 1, model=model)


@pytest.mark.parametrize("key", ["zero_hpz_partition_size", "mics_shard_size"])
def test_group_sizes_become_a_mesh(key: str, fake_group: Any) -> None:
    fake_group(8)
    config = parse({"zero_optimization": {"stage": 3, key: 4}})
    mesh = to_options(config, 8)["mesh"]
    assert isinstance(mesh, DeviceMesh)
    assert (mesh.size(0), mesh.size(1), mesh.mesh_dim_names) == (2, 4, ("replicate", "shard"))
    assert to_options(config, 8)["mesh"] is mesh, "groups are made once"
    assert to_options(parse({"zero_optimization": {key: 8}}), 8) == {}
    with pytest.raises(OptionError, match=f"{key} = 3 does not divide the 8 ranks"):
        to_options(parse({"zero_optimization": {key: 3}}), 8)


def test_a_mesh_made_for_one_process_group_is_not_used_for_the_next(fake_group: Any) -> None:
    config = parse({"zero_optimization": {"mics_shard_size": 2}})
    fake_group(4)
    first = to_options(config, 4)["mesh"]
    dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    assert to_options(config, 4)["mesh"] is not first


def test_both_group_sizes_are_refused() -> None:
    with pytest.raises(OptionError, match="give one of them"):
        parse({"zero_optimization": {"mics_shard_size": 2, "zero_hpz_partition_size": 2}})


# ------------------------------------------------------------------------------ noted


def written(key: str) -> Any:
    """Some value of the right kind, with which no section is switched off."""
    *parents, name = key.split(".")
    section: Any = Config
    for parent in parents:
        kinds = getattr(section.model_fields[parent].annotation, "__args__", ())
        section = next(
            (k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)),
            section.model_fields[parent].annotation,
        )
    kind = str(section.model_fields[name].annotation)
    for word, value in (("dict", {"x": 1}), ("bool", True), ("Literal", "fp32"), ("int", 7)):
        if word in kind:
            return value
    return ["a"] if "list" in kind else 1.0 if "float" in kind else "text"


@pytest.mark.parametrize("key", of(Verdict.NOTED))
def test_a_key_without_effect_is_accepted_with_its_reason(key: str) -> None:
    config = parse(nested(key, written(key)))
    assert f"{key}: {BY_NAME[key].text}" in notices(config)
    if key != "data_types.grad_accum_dtype":
        assert to_options(config, 1) in ({}, {"offload_optimizer": {}})


def test_all_keys_without_effect_share_one_warning() -> None:
    config = {"zero_optimization": {"contiguous_gradients": True, "round_robin_gradients": False}}
    with pytest.warns(UserWarning, match="have no effect") as caught:
        options_from(config)
    (warning,) = caught
    lines = str(warning.message).splitlines()
    assert len(lines) == 3
    assert warning.filename == __file__


def test_a_section_that_is_off_needs_no_notice() -> None:
    config = parse({"flops_profiler": {"enabled": False, "detailed": True}, "wandb": {}})
    assert notices(config, loop_is_users=True) == ""


@pytest.mark.parametrize("key", of(Verdict.LOOP))
def test_keys_of_the_loop_are_left_to_it_with_a_notice(key: str) -> None:
    beside = {"torch_autocast.dtype": "bf16"}
    config = parse(nested(key, beside.get(key, written(key))))
    assert notices(config) == ""
    assert f"{key}: {BY_NAME[key].text}" in notices(config, loop_is_users=True)
    assert to_options(config, 1) == {}


# ------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("key", of(Verdict.REFUSED))
def test_a_refused_key_says_why(key: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse(nested(key, written(key)))
    assert key in str(caught.value)
    assert str(caught.value).endswith(BY_NAME[key].text)


@pytest.mark.parametrize(
    "config",
    [
        {"sparse_gradients": False, "gradient_allreduce_op": "mean", "sequence_parallel_size": 1},
        {"amp": {"enabled": False, "opt_level": "O1"}, "elasticity": {}, "autotuning": None},
        {"zero_optimization": {"zero_quantized_weights": False, "zeropp_loco_param": None}},
        {"compile": {"backend": "inductor", "kwargs": {}, "offload_parameters": False}},
    ],
)
def test_a_refused_key_may_say_that_it_is_off(config: dict[str, Any]) -> None:
    parse(config)


def test_gradients_add_up_in_the_models_dtype_or_are_refused() -> None:
    same = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    assert to_options(parse(same), 1) == {"bf16": True}
    other = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(UnsupportedError, match="'fp32': gradients add up in bfloat16"):
        to_options(parse(other), 1)


def test_two_precisions_are_refused() -> None:
    with pytest.raises(OptionError, match="bf16 and fp16 are both enabled"):
        parse({"bf16": {"enabled": True}, "fp16": {"enabled": True}})


# ------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {}}, "unknown key 'zero_optimisation'. Did you mean 'zero_optimi"),
        (
            {"zero_optimization": {"stage3_max_live_params": 1}},
            "'stage3_max_live_params' in section zero_optimization. Did you mean 'stage3_max_live_param",
        ),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "unknown key 'devise' in section zero_optimization.offload_param. Did you mean 'device'",
        ),
        (
            {"fp16": {"enable": True}},
            "unknown key 'enable' in section fp16. Did you mean 'enabled'",
        ),
        ({"stage": 3}, "unknown key 'stage'. It belongs to zero_optimization."),
        (
            {"bf16": {"train_batch_size": 3}},
            "'train_batch_size' in section bf16. It belongs to the top",
        ),
        ({"aio": {"queue": 3}}, "unknown key 'queue' in section aio. Did you mean 'queue_depth'"),
        (
            {"zero_optimization": True},
            "zero_optimization is a section with keys of its own, got True",
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: .*0, 1, 2 or 3.*got 4"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping: .*number.*got '1.0'"),
        ({"train_batch_size": 2.5}, "train_batch_size: .*integer.*got 2.5"),
        ({"train_batch_size": 0}, "train_batch_size: .*greater than 0"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled: .*boolean.*got 'yes'"),
        (
            {"zero_optimization": {"offload_param": {"device": "disk"}}},
            "zero_optimization.offload_param.device: .*'none', 'cpu' or 'nvme'.*got 'disk'",
        ),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(config: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse(config)


def test_auto_and_null_count_as_not_given() -> None:
    auto = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "offload_param": {"device": "cpu", "buffer_size": "auto"},
            "offload_optimizer": None,
        },
    }
    config = parse(auto)
    assert to_options(config, 1) == {"offload_param": {"device": "cpu"}}
    assert (config.train_batch_size, config.gradient_clipping) == (None, 0.0)
    assert config.optimizer.params == {"eps": 1e-6}


def test_bfloat16_is_an_older_name_of_bf16() -> None:
    assert to_options(parse({"bfloat16": {"enabled": True}}), 1) == {"bf16": True}


def test_the_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse({}).train_batch_size = 1  # type: ignore[misc]


# ------------------------------------------------------------------------------ batch sizes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((24, 3, 2), (24, 3, 2)),
        ((24, 3, None), (24, 3, 2)),
        ((24, None, 2), (24, 3, 2)),
        ((None, 3, 2), (24, 3, 2)),
        ((24, None, None), (24, 6, 1)),
        ((None, 3, None), (12, 3, 1)),
    ],
)
def test_batch_sizes_on_four_ranks(given: Any, expected: Any) -> None:
    assert resolve_batch(parse(_batch(*given)), 4) == Batch(*expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, None, None), "give train_batch_size or train_micro_batch_size_per_gpu"),
        ((None, None, 2), "give train_batch_size or train_micro_batch_size_per_gpu"),
        (
            (25, 3, 2),
            r"25 is not train_micro_batch_size_per_gpu 3 \* gradient_accumulation_steps 2",
        ),
        ((25, None, 2), r"25 is not divisible by gradient_accumulation_steps 2 \* 4 ranks"),
        ((25, 3, None), r"25 is not divisible by train_micro_batch_size_per_gpu 3 \* 4 ranks"),
        ((2, 1, None), r"2 is not divisible by train_micro_batch_size_per_gpu 1 \* 4 ranks"),
        ((25, None, None), "25 is not divisible by 4 ranks"),
    ],
)
def test_batch_sizes_that_do_not_fit_say_which(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        resolve_batch(parse(_batch(*given)), 4)


def _batch(train: int | None, micro: int | None, accumulation: int | None) -> dict[str, Any]:
    return {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }


# ------------------------------------------------------------------------------ as an option


def test_the_option_takes_a_path_or_a_dict_and_others_win(tmp_path: Path) -> None:
    config = {
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e5},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in (config, path, str(path)):
            options = parse_options({"config": source})
            assert (options.bf16, options.reduce_dtype) == (True, "float32")
            assert options.reduce_bucket_size == 5 * 10**5
        over = {"reduce_bucket_size": 7, "communication_data_type": "bf16", "verify": False}
        options = parse_options({"config": path, **over})
    assert (options.reduce_bucket_size, options.reduce_dtype) == (7, "bfloat16")
    assert options.bf16
    assert not options.verify


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bf16":\n  {"enabled" true}}', "line 2, column 14"),
        ("[1]", "holds a list, not an object"),
        ('{"bf16": {}, "bf16": {}}', "key 'bf16' is given twice"),
    ],
)
def test_bad_json_is_named_by_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        parse_options({"config": path})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("source", ["/nowhere/ds.json", "/", 3])
def test_a_config_that_cannot_be_read_is_named(source: Any) -> None:
    with pytest.raises(OptionError, match=str(source)):
        parse_options({"config": source})


def test_another_stage_than_the_backends_is_refused() -> None:
    config = {"zero_optimization": {"stage": 2}}
    assert options_from(config, stage=2) == {}
    with pytest.raises(OptionError, match=r'stage is 2 and the backend zero3.*backend="zero2"'):
        options_from(config, stage=3)


def test_a_model_compiled_with_a_config_is_sharded_as_it_says(fake_group: Any) -> None:
    fake_group(4)
    zero = {"stage": 3, "mics_shard_size": 2, "reduce_bucket_size": 64}
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()
    options = {"config": {"bf16": {"enabled": True}, "zero_optimization": zero}}
    step = torch.compile(model, backend="zero3", options=options)
    step(torch.ones(2, 6).bfloat16()).sum().backward()
    (session,) = sessions(model)
    assert (session.group.world_size, session.group.data_ranks) == (2, 4)
    assert session.policy.master_weights
    assert len(session.buckets) == 2


def test_keys_are_rows_of_three() -> None:
    assert all(isinstance(key, Key) and key.text and "|" not in key.text for key in KEYS)
