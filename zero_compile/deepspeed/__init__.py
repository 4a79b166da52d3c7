"""What a DeepSpeed user brings: its JSON, ``initialize`` and its engine, schedules, memory estimates."""
