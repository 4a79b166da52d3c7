"""Side-by-side measurements of ZeRO-3 as a torch.compile backend: `python -m bench --help`."""
