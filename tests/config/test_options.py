"""options: what may stand in ``torch.compile(..., options={...})``."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from zero_compile.config.options import Options, parse
from zero_runtime.errors import OptionError


@pytest.mark.parametrize("given", [None, {}])
def test_nothing_needs_to_be_given(given):
    options = parse(given)
    assert options == Options()
    assert (options.bucket_bytes, options.schedule, options.verify) == (None, "planned", True)
    assert options.inductor == {}


def test_every_option_can_be_given():
    options = parse(
        {
            "bucket_bytes": 4096,
            "schedule": "on_demand",
            "verify": False,
            "inductor": {"max_autotune": True},
        }
    )
    assert options.bucket_bytes == 4096
    assert options.schedule == "on_demand"
    assert not options.verify
    assert options.inductor == {"max_autotune": True}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bucket_byte", "bucket_bytes"),
        ("reduce_bucket", "reduce_bucket_size"),
        ("shedule", "schedule"),
        ("Verify", "verify"),
        ("inductor_config", "inductor"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(name, meant):
    with pytest.raises(OptionError, match=f"unknown option '{name}'. Did you mean '{meant}'?"):
        parse({name: 1})


def test_an_unknown_name_like_no_other_lists_them_all():
    with pytest.raises(OptionError) as caught:
        parse({"zzz": 1})
    message = str(caught.value)
    assert "Did you mean" not in message
    assert message.endswith(
        "Valid options: aio, bf16, bucket_bytes, config, device_memory, fp16, group, hardware, host_memory, "
        "inductor, leaf_modules, mesh, nvme_path, offload_activations, offload_optimizer, "
        "offload_param, overlap_comm, record, reduce_bucket_size, reduce_dtype, schedule, "
        "stage3_max_live_parameters, stage3_max_reuse_distance, stage3_param_persistence_threshold, "
        "stage3_prefetch_bucket_size, tile_bytes, tile_over, update_in_backward, verify."
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket_bytes", "16"),
        ("bucket_bytes", 1.5),
        ("bucket_bytes", True),
        ("bucket_bytes", 0),
        ("bucket_bytes", -1),
        ("schedule", "two_ahead"),
        ("schedule", 1),
        ("verify", "yes"),
        ("verify", 1),
        ("inductor", [("max_autotune", True)]),
        ("inductor", {1: True}),
    ],
)
def test_a_wrong_value_is_an_error_that_names_option_and_value(name, value):
    with pytest.raises(OptionError, match=rf"option '{name}.*got ") as caught:
        parse({name: value})
    assert not isinstance(caught.value.__cause__, ValidationError), "one message, not two"


def test_a_wrong_schedule_lists_the_right_ones():
    with pytest.raises(OptionError, match="'planned', 'one_ahead', 'on_demand' or 'all_first'"):
        parse({"schedule": "two_ahead"})


def test_an_option_error_is_a_value_error():
    with pytest.raises(ValueError, match="unknown option"):
        parse({"nope": 1})


def test_options_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Options().bucket_bytes = 1


def test_defaults_are_not_shared():
    Options().inductor["max_autotune"] = True
    assert Options().inductor == {}


def test_what_the_user_gave_is_not_changed():
    given = {"bucket_bytes": 4096}
    parse(given)
    assert given == {"bucket_bytes": 4096}


def test_inductors_options_reach_inductor(fake_group):
    seen = []
    fake_group(1)
    model = nn.Linear(4, 4, bias=False)
    inductor = {"post_grad_custom_post_pass": lambda graph: seen.append(graph)}
    compiled = torch.compile(model, backend="zero3", options={"inductor": inductor})
    with torch.no_grad():
        compiled(torch.randn(2, 4))
    assert len(seen) == 1


def test_an_unknown_option_of_inductor_is_an_error(fake_group):
    fake_group(1)
    options = {"inductor": {"max_autotunes": True}}
    compiled = torch.compile(nn.Linear(4, 4), backend="zero3", options=options)
    with torch.no_grad(), pytest.raises(Exception, match="max_autotunes"):
        compiled(torch.randn(2, 4))


def test_an_unknown_option_is_an_error_at_the_first_forward(fake_group):
    fake_group(1)
    compiled = torch.compile(nn.Linear(4, 4), backend="zero3", options={"bucket_byte": 1})
    with torch.no_grad(), pytest.raises(Exception, match="Did you mean 'bucket_bytes'"):
        compiled(torch.randn(2, 4))


def test_deepspeeds_precision_sections_mean_our_options() -> None:
    assert parse({"bf16": {"enabled": True}}).bf16
    assert not parse({"fp16": {"enabled": False}}).fp16
    assert parse({"communication_data_type": "fp32"}).reduce_dtype == "float32"
    with pytest.warns(UserWarning, match=r"init_scale=2\.0\*\*12, growth_interval=1000"):
        assert parse({"fp16": {"enabled": True, "initial_scale_power": 12}}).fp16
    with pytest.warns(UserWarning, match=r"init_scale=128\.0, growth_interval=2\*\*31"):
        parse({"fp16": {"enabled": True, "loss_scale": 128.0}})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"bf16": {"enable": True}}, r"unknown key bf16\.enable\. Did you mean 'enabled'"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, r"fp16\.hysteresis: .*greater than 0"),
        ({"fp16": {"enabled": True, "auto_cast": True}}, r"fp16\.auto_cast: cast the inputs"),
    ],
)
def test_wrong_precision_sections_name_the_key(section: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse(section)


def test_whole_floats_count_elements_as_deepspeeds_configs_write_them() -> None:
    options = parse({"stage3_max_live_parameters": 1e9, "reduce_bucket_size": 5e8})
    assert options.stage3_max_live_parameters == 10**9
    assert options.reduce_bucket_size == 5 * 10**8
    with pytest.raises(OptionError, match="stage3_max_live_parameters"):
        parse({"stage3_max_live_parameters": 1.5})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"offload_param": {"device": "cpu", "bufer_count": 3}},
            r"unknown key 'offload_param\.bufer_count'\. Did you mean 'buffer_count'\? Valid keys: bu",
        ),
        ({"offload_optimizer": {"zzz": 3}}, r"unknown key 'offload_optimizer\.zzz'\. Valid keys: "),
        ({"offload_optimizer": "cpu"}, r'expected a section like \{"device": "cpu"\}, got \'cpu\''),
        ({"offload_param": True}, r'expected a section like \{"device": "cpu"\}, got True'),
    ],
)
def test_a_wrong_section_says_what_is_valid(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse(options)
