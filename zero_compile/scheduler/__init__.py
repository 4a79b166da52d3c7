"""Decides when gathers, reductions and moves start. Touches no node."""
