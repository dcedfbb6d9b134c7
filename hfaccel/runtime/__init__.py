"""One packed forward over a paged cache, and the executors that run it."""


class Unsupported(Exception):
    """An executor cannot serve this model here; the message says why. Never reaches the user by itself."""
