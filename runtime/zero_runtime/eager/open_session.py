"""How a session is made: what its parameters are to eager code, and while the model is built, comes from here."""

from zero_runtime.comm.transports import Group
from zero_runtime.eager.construction import PartitionedConstruction
from zero_runtime.eager.sharded_parameter import class_for
from zero_runtime.ir.placement import Offload
from zero_runtime.ir.plan import StatePolicy
from zero_runtime.session import LayOut, Session


def open_session(
    group: Group, lay_out: LayOut, policy: StatePolicy, offload: Offload | None = None
) -> Session:
    """A session without parameters; state stays on the device unless ``offload`` says otherwise."""
    session = Session(group, lay_out, policy, offload or Offload())
    session.attach(class_for(session), PartitionedConstruction(session))
    return session
