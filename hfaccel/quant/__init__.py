"""Weights in fewer bits: packed modules and the methods that choose their codes."""
