"""Ways to show a timeline: tables, a comparison, a trace file and a page. All are pure functions."""
