"""Collectives between ranks, and the comparison of what ranks are about to do."""
