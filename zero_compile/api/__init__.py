"""Functions that users call beside torch.compile."""
