"""What ``dump_schedule`` writes as JSON and compares: plans and timelines of one model, with facts."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from zero_runtime.errors import OptionError
from zero_runtime.ir.plan import Plan
from zero_runtime.ir.timeline import Timeline


@dataclass(frozen=True)
class Document:
    """One previewed or recorded step."""

    title: str
    facts: dict[str, str]
    plans: tuple[Plan, ...]
    timelines: tuple[Timeline, ...]

    def write(self, path: Path) -> None:
        """As JSON.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_text(_ADAPTER.dump_json(self, indent=1).decode())


_ADAPTER = TypeAdapter(Document)


def read(path: Path) -> Document:
    """A document, or one plan or one timeline as a document of its own.

    Raises:
        OptionError: there is no such file, or it holds none of these.
    """
    if not path.is_file():
        raise OptionError(f"there is no file {path}")
    text = path.read_text()
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
    try:
        plan = Plan.from_json(text)
        return Document(plan.name, {}, (plan,), ())
    except ValidationError:
        pass
    try:
        timeline = Timeline.from_json(text)
        return Document(timeline.name, {}, (), (timeline,))
    except ValidationError:
        raise OptionError(f"{path} holds no schedule, plan or timeline: {reason}") from None
