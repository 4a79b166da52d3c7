"""Plays, checks and explains what was decided."""
