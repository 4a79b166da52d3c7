"""One plan as tables: its buckets and its steps, with what is held at every step."""

from rich.table import Table

from zero_runtime.ir.plan import OF_SAVED, BucketPlan, Plan, Residence, Step, StepKind


def buckets_table(plan: Plan) -> Table:
    """One row a bucket; where shards and optimizer state live, if any live off the device."""
    table = Table(title=f"{plan.name}: buckets over {plan.world_size} ranks")
    moved = any(bucket.residence != Residence() for bucket in plan.buckets)
    homes = ("shards on", "optimizer on") if moved else ()
    for heading in ("bucket", "dtype", "elements", "a rank", *homes, "parameters"):
        right = heading in ("bucket", "elements", "a rank")
        table.add_column(heading, justify="right" if right else "left")
    for number, bucket in enumerate(plan.buckets):
        where = (bucket.residence.parameters, bucket.residence.optimizer) if moved else ()
        sizes = (f"{bucket.padded:,}", f"{bucket.chunk:,}")
        table.add_row(str(number), bucket.dtype, *sizes, *where, _names(bucket))
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
        moves = megabytes(step.bytes) if _moves(step) else ""
        table.add_row(
            str(step.position),
            step.kind,
            plan.saved[step.bucket].name if step.kind in OF_SAVED else str(step.bucket),
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


def _moves(step: Step) -> bool:
    return step.kind.endswith("_start") or step.kind is StepKind.EVICT


def megabytes(count: int) -> str:
    """Bytes as MB with two digits."""
    return f"{count / 1e6:.2f} MB"


def _names(bucket: BucketPlan, most: int = 3) -> str:
    names = [slot.name for slot in bucket.slots]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
