"""Commands of `hfaccel` that are long enough for a module of their own; `cli.py` lists them all."""
