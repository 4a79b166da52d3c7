"""DeepSpeed's JSON: its keys, sections, and the options that they mean."""
