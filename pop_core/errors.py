"""Errors meant for a person: one sentence that says what was wrong and what is allowed.

Pages show the sentence, the command line prints it on stderr and exits with 2. Anything else that is raised is a
bug and keeps its traceback.
"""


class PopError(ValueError):
    """Input that cannot be used, in one clear sentence."""


class ModelNotFound(PopError):
    """No such hub model, folder or file."""


class ModelGated(PopError):
    """The hub wants a token, or this token has no access."""


class HubOffline(PopError):
    """The hub cannot be reached and the model is not in the local cache."""


class UnsupportedModel(PopError):
    """An architecture, or an option of one, that the decoder does not run."""


class BrokenModel(PopError):
    """A file is corrupt, or a tensor is missing, unexpected or of the wrong shape."""


class NotEnoughMemory(PopError):
    """The estimate of what is needed is above what is free."""


class Cancelled(Exception):
    """The person pressed Stop. Not an error: whoever catches it keeps what was done so far."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, as a part of one of our sentences."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
