"""Which share of the state lives where: as the user says, or as it fits."""

import os
from pathlib import Path
from typing import Any

import pytest

from zero_compile.analysis.resident_memory import Held
from zero_compile.capture.offload import check_offload, offload_of, refuse_folders
from zero_compile.config.options import parse
from zero_compile.scheduler.placement import WORKING_SHARE, Budgets, Wish, place
from zero_runtime.errors import OptionError
from zero_runtime.ir.aio import AioConfig
from zero_runtime.ir.placement import ON_DEVICE, Offload, Shares
from zero_runtime.ir.plan import Residence, Stage, StatePolicy, Tier
from zero_runtime.offload.residences import Residences

MIB = 1 << 20
#: A million float32 parameters: 4 MiB, with Adam 8 MiB more, and 4 MiB of gradients.
HELD = [Held(MIB, "float32", True)]
BF16 = [Held(MIB, "bfloat16", True)]


NO_WISH = Wish()


def placed(budgets: Budgets, wish: Wish = NO_WISH, held: list[Held] = HELD, ranks: int = 1) -> Any:
    return place(held, StatePolicy(), ranks, wish, budgets)


def test_without_a_word_everything_stays_on_the_device() -> None:
    found = placed(Budgets())
    assert found == (ON_DEVICE, ON_DEVICE, 0)


def test_what_the_user_says_is_done() -> None:
    found = placed(Budgets(nvme=True), Wish(Tier.HOST, Tier.NVME))
    assert found.parameters == Shares(0, 1, 0)
    assert found.optimizer == Shares(0, 0, 1)
    assert found.nvme_bytes == 8 * MIB


def test_the_ratio_is_the_share_that_leaves() -> None:
    found = placed(Budgets(), Wish(optimizer=Tier.HOST, ratio=0.25))
    assert found.optimizer == Shares(0.75, 0.25, 0)


def test_max_in_cpu_is_elements_of_one_rank() -> None:
    wish = Wish(parameters=Tier.NVME, max_in_cpu=MIB // 8)
    found = placed(Budgets(nvme=True), wish, ranks=2)
    assert found.parameters == Shares(0, 0.25, 0.75)


def test_state_moves_off_a_device_that_is_too_small_optimizer_first() -> None:
    device = int((4 + 4) * MIB / (1 - WORKING_SHARE)) + 10  # parameters and gradients fit, no more
    found = placed(Budgets(device=device, decide=True))
    assert found.parameters == ON_DEVICE
    assert found.optimizer.device < 0.01
    assert found.optimizer.host > 0.99


def test_what_the_host_has_no_room_for_goes_to_nvme() -> None:
    device = int((4 + 4) * MIB / (1 - WORKING_SHARE)) + 10
    found = placed(Budgets(device=device, host=2 * MIB, nvme=True, decide=True))
    assert found.optimizer.host == pytest.approx(0.25, abs=0.01)
    assert found.optimizer.nvme == pytest.approx(0.75, abs=0.01)
    assert found.nvme_bytes == pytest.approx(6 * MIB, rel=0.01)


def test_a_host_that_is_too_small_without_a_disk_is_an_error_that_says_by_how_much() -> None:
    with pytest.raises(OptionError, match=r"host_memory of .* too small .* nvme_path"):
        placed(Budgets(host=MIB), Wish(optimizer=Tier.HOST))
    with pytest.raises(OptionError, match="too small"):
        placed(Budgets(device=MIB, host=MIB, decide=True))


def test_what_is_sent_to_a_host_that_is_too_small_goes_on_to_nvme() -> None:
    found = placed(Budgets(host=6 * MIB, nvme=True), Wish(Tier.HOST, Tier.HOST))
    assert found.parameters == Shares(0, 1, 0)
    assert found.optimizer == Shares(0, 0.25, 0.75)


def test_masters_count_as_optimizer_state() -> None:
    policy = StatePolicy(master_weights=True)
    found = place(BF16, policy, 1, Wish(optimizer=Tier.NVME), Budgets(nvme=True))
    assert found.nvme_bytes == 12 * MIB


# ------------------------------------------------------------------------------ bucket by bucket


@pytest.mark.parametrize(
    "shares", [Shares(0.5, 0.5, 0), Shares(0.2, 0.3, 0.5), Shares(0, 0.1, 0.9)]
)
def test_after_any_number_of_buckets_each_tier_has_its_share(shares: Shares) -> None:
    residences = Residences(Offload(optimizer=shares))
    dealt = dict.fromkeys(Tier, 0)
    for number in range(1, 200):
        dealt[residences.of(100, True).optimizer] += 100
        for tier, share in zip(Tier, shares, strict=True):
            assert abs(dealt[tier] - share * 100 * number) <= 100


def test_a_frozen_bucket_has_no_optimizer_state_to_offload() -> None:
    residences = Residences(Offload(parameters=Shares(0, 1, 0), optimizer=Shares(0, 0, 1)))
    assert residences.of(10, False) == Residence(Tier.HOST, Tier.DEVICE)
    assert residences.of(10, True) == Residence(Tier.HOST, Tier.NVME)


# ------------------------------------------------------------------------------ options


def offload(options: dict[str, Any], stage: Stage = Stage.PARAMETERS) -> Offload:
    return offload_of(parse(options), HELD, StatePolicy(stage), 1)


def test_sections_become_a_policy() -> None:
    found = offload(
        {
            "offload_param": {"device": "nvme", "nvme_path": "/a", "buffer_count": 7},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/b", "buffer_count": 3},
            "aio": {"block_size": 8192, "queue_depth": 4},
            "update_in_backward": True,
        }
    )
    assert found.folders == ("/b", "/a")
    assert (found.slots, found.sets) == (7, 3)
    assert (found.aio.block_size, found.aio.queue_depth) == (8192, 4)
    assert found.in_backward


def test_deepspeeds_newer_keys_of_aio_are_taken() -> None:
    section = {"thread_count": 2, "intra_op_parallelism": 3, "use_gds": True}
    from_config = {"config": {"zero_optimization": {"stage": 3}, "aio": section}}
    with pytest.warns(UserWarning, match="no effect, and need none:\n.*aio.use_gds"):
        configured = parse(from_config).aio
    assert parse({"aio": section}).aio == configured == AioConfig(thread_count=3)


def test_several_folders_are_one_place() -> None:
    options = {"offload_optimizer": {"device": "nvme"}, "nvme_path": ["/a", "/b"]}
    assert offload(options).folders == ("/a", "/b")


def test_numbers_may_be_written_as_deepspeed_writes_them() -> None:
    section = {"device": "nvme", "nvme_path": "/a", "buffer_size": 1e8, "max_in_cpu": 1e9}
    assert offload({"offload_param": section}).parameters == Shares(0, 1, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_param": {"device": "disk"}}, "option 'offload_param.device'"),
        (
            {"offload_optimizer": {"devise": "cpu"}},
            "unknown key 'offload_optimizer.devise'. Did you mean 'device'",
        ),
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "offload_optimizer.ratio"),
        ({"offload_optimizer": {"device": "nvme"}}, "no folder: give nvme_path"),
        ({"offload_param": {"device": "nvme"}}, "no folder: give nvme_path"),
        ({"offload_param": {"device": "cpu", "nvme_path": "/a"}}, "say device 'nvme'"),
        ({"offload_optimizer": {"super_offload": True}}, "super_offload is not supported"),
        ({"update_in_backward": True}, "give offload_optimizer too"),
        ({"update_in_backward": "yes"}, "expected True, False or an optimizer"),
        ({"aio": {"block_size": 5}}, "block_size must be"),
        ({"aio": {"use_gds": 1}}, "use_gds must be of type bool, got 1"),
        ({"aio": {"blocksize": 5}}, "unknown key 'blocksize'"),
        ({"host_memory": "lots"}, "'lots' is not a size"),
        ({"nvme_path": ""}, "option 'nvme_path': expected a folder, or a list of folders, got ''"),
        ({"nvme_path": ["/a", ""]}, r"list of folders, got \['/a', ''\]"),
        ({"nvme_path": []}, r"list of folders, got \[\]"),
        (
            {"offload_param": {"device": "nvme", "nvme_path": ""}},
            "option 'offload_param.nvme_path'",
        ),
    ],
)
def test_a_wrong_option_says_what_and_where(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        offload(options)


@pytest.mark.parametrize("stage", [Stage.OPTIMIZER, Stage.GRADIENTS])
def test_parameters_are_offloaded_at_stage_3_only(stage: Stage) -> None:
    with pytest.raises(OptionError, match='offload_param needs backend="zero3"'):
        check_offload(parse({"offload_param": {"device": "cpu"}}), stage)


@pytest.mark.parametrize("what", ["missing", "file", "pipe", "/proc"])
@pytest.mark.parametrize("option", ["nvme_path", "offload_param", "offload_activations"])
def test_a_folder_in_which_no_file_can_be_made_is_refused(
    tmp_path: Path, what: str, option: str
) -> None:
    """A pipe is not waited for, and what is there stays."""
    path = tmp_path / what
    if what == "file":
        path.write_text("not ours")
    elif what == "pipe":
        os.mkfifo(path)
    section = {"device": "nvme", "nvme_path": [str(tmp_path), str(path)]}
    settings = parse({option: section["nvme_path"] if option == "nvme_path" else section})
    with pytest.raises(OptionError, match=f"nvme_path '{path}': .*Name a folder on a local disk"):
        refuse_folders(settings)
    assert os.listdir(tmp_path) == ([what] if what in ("file", "pipe") else [])
    if what == "file":
        assert path.read_text() == "not ours"


def test_folders_in_which_files_can_be_made_are_left_as_they_are(tmp_path: Path) -> None:
    refuse_folders(parse({"nvme_path": str(tmp_path)}))
    refuse_folders(parse(None))
    assert not list(tmp_path.iterdir())
