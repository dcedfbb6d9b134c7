"""Everything that hfaccel refuses: a `PatchError` names what was wrong and what is known."""


class PatchError(ValueError):
    """A refusal; nothing has been changed when it is raised."""


class UnknownName(PatchError):
    """A name (recipe step, option, transform, field) that does not exist; the message lists those that do."""


class NoMatch(PatchError):
    """A target or ignore pattern that selects nothing; the message shows the closest names of the model."""


class UnsupportedModel(PatchError):
    """A model, or a part of it, that cannot be handled as asked."""


class AlreadyPatched(PatchError):
    """The model carries a patch already; `hfaccel.unpatch` takes it back."""


class CheckpointError(PatchError):
    """A saved folder that does not agree with its own record."""
