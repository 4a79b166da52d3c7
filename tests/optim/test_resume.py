"""Training goes on from saved files as if it had not stopped: masters, state rounded by torch, other layouts."""

import copy
import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

import ranks
import zero_compile
from training import mine
from zero_compile import safe_get_full_optimizer_state
from zero_runtime.errors import UnsupportedError, ZeroError


class Net(nn.Module):
    """Wide enough for tiles; training uses a part that evaluation does not."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(32, 5)
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.norm(torch.tanh(self.up(x)))).square().mean()
        return y + self.aux(x).square().mean() if self.training else y


class Job:
    """A model, its compiled form and an optimizer."""

    def __init__(
        self,
        options: dict[str, Any],
        dtype: torch.dtype = torch.float32,
        backend: str = "zero3",
        kind: Any = torch.optim.AdamW,
        **hyper: Any,
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.dtype = Net().to(dtype), dtype
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-2, **hyper})
        if options.get("update_in_backward"):
            options = {**options, "update_in_backward": self.optimizer}
        self.compiled = torch.compile(self.model, backend=backend, options=options)

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        (x,) = mine((torch.randn(8, 32, generator=generator),))
        return self.compiled(x.to(self.dtype)).float()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.forward(0)
        self.model.train()

    def train(self, *steps: int) -> "Job":
        for step in steps:
            self.forward(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def saved(self) -> tuple[bytes, bytes]:
        return _bytes(self.model.state_dict()), _bytes(self.optimizer.state_dict())

    def load(self, files: tuple[bytes, bytes]) -> "Job":
        self.model.load_state_dict(torch.load(io.BytesIO(files[0])))
        self.optimizer.load_state_dict(torch.load(io.BytesIO(files[1])))
        return self

    def everything(self) -> dict[str, torch.Tensor]:
        """All values that training depends on, whole."""
        found = {}
        for name, p in self.model.named_parameters():
            for key in self.optimizer.state_dict()["state"][0]:
                state = safe_get_full_optimizer_state(p, key, optimizer=self.optimizer)
                found[f"{key} of {name}"] = state
            found[f"value of {name}"] = zero_compile.safe_get_full_fp32_param(p)
        return found


def _bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def _off(place: str, folder: Any, parameters: bool = False) -> dict[str, Any]:
    section = {"device": place, **({"nvme_path": str(folder)} if place == "nvme" else {})}
    return {"offload_optimizer": section, **({"offload_param": section} if parameters else {})}


# ------------------------------------------------------------------------------ float32 masters


def _with_masters(backend: str, options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    options = {"bf16" if dtype is torch.bfloat16 else "fp16": True, **options}
    make = lambda: Job(options, dtype, backend, eps=1e-4)  # noqa: E731
    job = make().train(0, 1)
    files = job.saved()
    expected = job.train(2, 3).everything()
    found: dict[str, Any] = {}
    for when in ("before anything", "after a forward", "after a step"):
        job = make()
        if when == "after a forward":
            job.forward(9)
        if when == "after a step":
            job.train(9)
        found[when] = _differing(job.load(files).train(2, 3).everything(), expected)
    master = expected["value of up.weight"]
    found["masters are finer"] = [] if not torch.equal(master, master.to(dtype).float()) else ["no"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "place", "dtype"),
    [
        ("zero1", None, torch.bfloat16),
        ("zero2", None, torch.bfloat16),
        ("zero3", None, torch.bfloat16),
        ("zero3", None, torch.float16),
        ("zero1", "cpu", torch.bfloat16),
        ("zero3", "cpu", torch.bfloat16),
        ("zero3", "nvme", torch.bfloat16),
    ],
)
def test_training_with_masters_goes_on_to_the_bit(
    backend: str, place: str | None, dtype: torch.dtype, tmp_path: Any
) -> None:
    options = {} if place is None else _off(place, tmp_path, backend == "zero3")
    for found in ranks.run(2, _with_masters, backend, options, dtype):
        assert not any(found.values()), found


def _engine() -> list[str]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }

    def make() -> Job:
        job = Job({})
        engine = zero_compile.initialize(
            model=job.model, model_parameters=job.model.parameters(), config=config
        )[0]
        job.dtype, job.compiled, job.optimizer = torch.bfloat16, engine, engine.optimizer
        return job

    job = make().train(0, 1)
    files = job.saved()
    expected = job.train(2, 3).everything()
    return _differing(make().load(files).train(2, 3).everything(), expected)


def test_an_engine_goes_on_to_the_bit() -> None:
    assert ranks.run(2, _engine) == [[], []]


def _once_more() -> list[str]:
    """Loaded, and saved again before anything was done with it."""
    options = {"bf16": True}
    job = Job(options, torch.bfloat16).train(0, 1)
    files = job.saved()
    expected = job.train(2).everything()
    between = Job(options, torch.bfloat16).load(files)
    again = Job(options, torch.bfloat16)
    again.forward(9)
    again.load((files[0], between.saved()[1]))
    last = Job(options, torch.bfloat16).load((files[0], again.saved()[1]))
    return _differing(last.train(2).everything(), expected)


def test_what_was_loaded_can_be_saved_again() -> None:
    assert ranks.run(2, _once_more) == [[], []]


def _edited() -> dict[str, bool]:
    """Files whose state and weights were changed before they were loaded."""
    job = Job({"bf16": True}, torch.bfloat16).train(0, 1)
    weights, state = (torch.load(io.BytesIO(file)) for file in job.saved())
    weights["up.bias"].fill_(0.25)
    for of_parameter in state["state"].values():
        of_parameter["exp_avg"] = torch.zeros_like(of_parameter["exp_avg"])
    before = job.everything()
    found = Job({"bf16": True}, torch.bfloat16).load((_bytes(weights), _bytes(state)))
    found.forward(9)
    after = found.everything()
    same = "value of up.weight", "exp_avg_sq of up.weight"
    return {
        "the weight given": bool((after["value of up.bias"] == 0.25).all()),
        "the state given": not after["exp_avg of up.weight"].any(),
        **{name: torch.equal(after[name], before[name]) for name in same},
    }


def test_a_value_that_was_changed_in_the_file_counts() -> None:
    for facts in ranks.run(2, _edited):
        assert all(facts.values()), facts


def _unsharded_state(options: dict[str, Any]) -> bool:
    """State of plain bfloat16 training goes on beside masters, in float32."""
    plain = Net().bfloat16()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain(torch.ones(2, 32).bfloat16()).backward()
    optimizer.step()
    job = Job({"bf16": True, **options}, torch.bfloat16)
    job.forward(9)
    job.load((_bytes(plain.state_dict()), _bytes(optimizer.state_dict())))
    found, parameters = job.everything(), list(plain.parameters())
    names = [name for name, _ in job.model.named_parameters()]
    job.train(0)
    return all(
        torch.equal(found[f"{key} of {name}"], optimizer.state[q][key].float())
        for name, q in zip(names, parameters, strict=True)
        for key in ("exp_avg", "exp_avg_sq")
    )


@pytest.mark.parametrize("place", [None, "cpu"])
def test_state_of_a_whole_model_is_taken_beside_masters(place: str | None) -> None:
    assert all(ranks.run(2, _unsharded_state, _off(place, None) if place else {}))


# ------------------------------------------------------------------------------ other layouts


#: Each is loaded from files of the one before it.
_LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tile_bytes": 1024, "tile_over": "rows"},
    {"tile_bytes": 2048, "tile_over": "columns"},
    {"bucket_bytes": 600},
    {"tile_bytes": 1024, "tile_over": "rows"},
    {},
]


def _other_layouts(dtype: torch.dtype, more: dict[str, Any], now: dict[str, Any]) -> list[Any]:
    job = Job({**_LAYOUTS[0], **more}, dtype).train(0)
    files, expected = job.saved(), job.everything()
    found = []
    for layout in _LAYOUTS[1:]:
        job = Job({**layout, **now}, dtype).load(files)
        job.forward(9)
        found.append((layout, _differing(job.everything(), expected)))
        files = job.saved()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_gets_its_elements_out_of_parts_in_another_layout(size: int) -> None:
    for found in ranks.run(size, _other_layouts, torch.float32, {}, {}):
        assert not any(names for _, names in found), found


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_masters_and_state_off_the_device_find_their_elements_in_another_layout(
    place: str, tmp_path: Any
) -> None:
    masters = {"bf16": True}
    now = {**masters, **_off(place, tmp_path)}
    for found in ranks.run(2, _other_layouts, torch.bfloat16, masters, now):
        assert not any(names for _, names in found), found


def _going_on(now: dict[str, Any], backend: str) -> list[float]:
    """What all values differ by after two more steps, with a resume that evaluates first and without."""
    job = Job({}).train(0, 1)
    files = job.saved()
    expected = job.train(2, 3).everything()
    job = Job(now, backend=backend)
    job.model.load_state_dict(torch.load(io.BytesIO(files[0])))
    job.evaluate()
    found = job.load(files).train(2, 3).everything()
    return [float((found[n] - v).abs().max()) for n, v in expected.items()]


@pytest.mark.slow
@pytest.mark.parametrize("now", ["plain", "zero1", "tiles", "cpu", "nvme", "in backward"])
def test_a_run_that_evaluates_first_goes_on_in_another_layout(now: str, tmp_path: Any) -> None:
    options = {
        "plain": {},
        "tiles": {"tile_bytes": 1024},
        "cpu": _off("cpu", tmp_path, parameters=True),
        "nvme": _off("nvme", tmp_path, parameters=True),
        "in backward": {**_off("cpu", tmp_path), "update_in_backward": True},
    }.get(now, {})
    backend = now if now == "zero1" else "zero3"
    for distances in ranks.run(2, _going_on, options, backend):
        assert max(distances) < 1e-6


def _alone() -> list[bool]:
    """In the same layout nothing is exchanged: one rank looks at its part, the others do not."""
    job = Job({}).train(0)
    files = job.saved()
    own = copy.deepcopy(job.optimizer.state_dict()["state"][2]["exp_avg"])
    job = Job({})
    job.forward(9)
    job.load(files)
    get = zero_compile.safe_get_local_optimizer_state
    found = []
    if dist.get_rank() == 0:
        p = list(job.model.parameters())[2]
        found.append(torch.equal(get(p, "exp_avg", optimizer=job.optimizer), own))
    dist.barrier()
    return found


def test_in_the_same_layout_nothing_is_communicated() -> None:
    assert ranks.run(2, _alone) == [[True], []]


def _one_rank_only() -> str:
    """One rank alone was given state in another layout."""
    state = torch.load(io.BytesIO(Job({}).train(0).saved()[1]))
    job = Job({"bucket_bytes": 600}).train(0)
    if dist.get_rank() == 0:
        job.optimizer.load_state_dict(state)
    try:
        job.everything()
    except ZeroError as error:
        return str(error)
    return "no error"


def test_ranks_of_which_one_was_given_another_layout_are_told() -> None:
    for said in ranks.run(2, _one_rank_only):
        assert "an exchange of exp_avg in torch.float32" in said


def _refused(change: str) -> str:
    job = Job({}).train(0)
    state = copy.deepcopy(job.optimizer.state_dict())
    if change == "order":
        names = dict(job.model.named_parameters())
        other = [names.pop("down.weight"), *names.values()]
        job.optimizer = torch.optim.AdamW(other)
    if change == "note":
        del state["param_groups"][0]["zero3_part"]["parts"]
    job.optimizer.load_state_dict(state)
    try:
        job.train(1)
    except ZeroError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("change", "says"), [("order", "down.weight.*is of aux.weight"), ("note", "which elements")]
)
def test_state_that_cannot_be_placed_is_refused(change: str, says: str) -> None:
    for said in ranks.run(2, _refused, change):
        assert re.search(says, said), said


def _from_the_start(options: dict[str, Any], kind: Any) -> list[str]:
    """A trained optimizer is given the state that it had before its first step: none."""
    job = Job(options, kind=kind)
    files = job.saved()
    expected = job.train(0, 1).everything()
    return _differing(job.load(files).train(0, 1).everything(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("place", [None, "cpu", "nvme"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_state_before_the_first_step_can_be_loaded_later(
    kind: Any, place: str | None, tmp_path: Any
) -> None:
    options = {} if place is None else _off(place, tmp_path)
    assert ranks.run(2, _from_the_start, options, kind) == [[], []]


# ------------------------------------------------------------------------------ torch.distributed.checkpoint


def _whole_checkpoints(steps: Sequence[int]) -> dict[str, bool]:
    warnings.simplefilter("ignore")
    job = Job({})
    job.forward(9)
    rate = job.optimizer.param_groups[0]["lr"]
    job.train(*steps)
    expected = {n: v.clone() for n, v in job.model.state_dict().items()}
    facts = {}
    try:
        get_state_dict(job.model, job.optimizer)
    except UnsupportedError as error:
        facts["refused"] = "one file a rank" in str(error)
    facts["rate"] = job.optimizer.param_groups[0]["lr"] == rate
    found = get_model_state_dict(job.model)
    facts["model"] = all(torch.equal(found[n], v) for n, v in expected.items())
    job.train(5)
    return facts


@pytest.mark.parametrize("steps", [(), (0, 1)])
def test_a_whole_checkpoint_of_the_optimizer_is_refused_and_one_of_the_model_is_not(
    steps: Sequence[int],
) -> None:
    for facts in ranks.run(2, _whole_checkpoints, steps):
        assert facts == {"refused": True, "rate": True, "model": True}
