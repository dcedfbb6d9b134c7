"""LoRA over packed weights."""
