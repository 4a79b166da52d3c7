"""What users write: options, sections and DeepSpeed's configs, checked."""
