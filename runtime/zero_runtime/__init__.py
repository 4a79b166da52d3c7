"""Executes plans: owns the shards, runs the collectives, keeps the gathered memory.

The runtime never imports the compiler. What it is told to do reaches it as data
(:class:`zero_runtime.ir.plan.Plan`) and as calls of the operators in :mod:`zero_runtime.ir.ops`.
"""
