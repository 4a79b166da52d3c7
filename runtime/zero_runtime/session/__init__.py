"""What one compiled model keeps between steps: a layer a file, each built on the one before."""

from zero_runtime.session.lifecycle import Session, session_of
from zero_runtime.session.registry import LayOut, Partitioned

__all__ = ["LayOut", "Partitioned", "Session", "session_of"]
