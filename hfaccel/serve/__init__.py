"""Many requests on one patched model: what goes into each step, the pages they share, the loop that runs."""
