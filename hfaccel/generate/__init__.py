"""`generate` over the runner: the class mixin, and the loop behind it."""
