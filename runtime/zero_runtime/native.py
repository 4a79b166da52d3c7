"""Where scripts ask what the arena holds, and give it back."""

from zero_runtime.memory.native import ArenaStats, reset_peak, stats, trim

__all__ = ["ArenaStats", "reset_peak", "stats", "trim"]
