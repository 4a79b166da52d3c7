"""One plan as tables: its buckets and its steps, with what is held at every step."""

from rich.table import Table

from zero_runtime.plan import BucketPlan, Plan


def buckets_table(plan: Plan) -> Table:
    """One row a bucket."""
    table = Table(title=f"{plan.name}: buckets over {plan.world_size} ranks")
    for heading in ("bucket", "dtype", "elements", "a rank", "parameters"):
        table.add_column(heading, justify="left" if heading in ("dtype", "parameters") else "right")
    for number, bucket in enumerate(plan.buckets):
        names = _names(bucket)
        table.add_row(str(number), bucket.dtype, f"{bucket.padded:,}", f"{bucket.chunk:,}", names)
    return table


def steps_table(plan: Plan) -> Table:
    """One row a step, in execution order."""
    table = Table(title=f"{plan.name}: steps ({plan.policy})")
    for heading in (
        "step",
        "kind",
        "bucket",
        "moves",
        "before",
        "gathered",
        "reducing",
        "gradients",
    ):
        table.add_column(heading, justify="left" if heading in ("kind", "before") else "right")
    for step in plan.steps:
        held = (step.gathered_bytes, step.reducing_bytes, step.gradient_bytes)
        moves = megabytes(step.bytes) if step.kind.endswith("_start") else ""
        table.add_row(
            str(step.position),
            step.kind,
            str(step.bucket),
            moves,
            step.before,
            *map(megabytes, held),
        )
    return table


def summary(plan: Plan) -> str:
    """The peaks, in one line."""
    return (
        f"peak: gathered {megabytes(plan.peak_gathered_bytes)}, reducing "
        f"{megabytes(plan.peak_reducing_bytes)}, together with gradients {megabytes(plan.peak_bytes)}"
    )


def megabytes(count: int) -> str:
    """Bytes as MB with two digits."""
    return f"{count / 1e6:.2f} MB"


def _names(bucket: BucketPlan, most: int = 3) -> str:
    names = [slot.name for slot in bucket.slots]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
