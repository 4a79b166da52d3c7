"""ZeRO-3 as a compiler pass: ``torch.compile(model, backend="zero3")``.

A training script needs nothing from here; the backends are found by name. What this package
offers on top looks at a compiled model: what it holds, and the plans it runs.
"""

from zero_compile.capture import partition
from zero_compile.no_sync import no_sync
from zero_compile.report import MemoryReport, memory_report, plans, timelines

__all__ = ["MemoryReport", "memory_report", "no_sync", "partition", "plans", "timelines"]
