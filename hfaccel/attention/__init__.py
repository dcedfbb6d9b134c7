"""Attention: the function that transformers calls, and the transforms that change it."""
