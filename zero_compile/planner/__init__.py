"""Decides when things move: liveness of a graph, what its nodes cost, the schedule, and its simulation.

Pure functions over frozen data; nothing here reads a clock or talks to another rank, so every rank
decides alike.
"""
