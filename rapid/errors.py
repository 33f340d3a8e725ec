"""Everything that can go wrong, as one tree.

::

    RapidError
    ├── BadRequest              the caller's mistake; names the field              400
    │   ├── PromptTooLong       by how many tokens, and what would work            400
    │   ├── BodyTooLarge        the request body is over the limit                 413
    │   └── UnknownModel        no such model behind this endpoint                 404
    ├── Unauthorized            missing or unknown API key                         401
    ├── Overloaded              pools are full; says when to come back             503
    ├── LeaseNotFound           released, expired, or never here: take a new one   503
    │   └── DrafterHangs        no block came in time: go on without, on a new lease   503
    ├── OutOfStep               a message for another position of the sequence     500
    ├── DrafterUnavailable      no drafter: `auto` and `lossless` go on without    503
    ├── TargetUnavailable       no target replica answered                         503
    ├── EngineFailed            a forward pass raised; the lease is gone           500
    └── ConfigurationError      refused before anything starts

Every class passes all its arguments to ``super().__init__`` so that it survives pickling between
processes; ``str(error)`` is the sentence for the user. `deployments.api.errors` turns the tree
into HTTP.
"""

from __future__ import annotations


class RapidError(Exception):
    """Root of the tree; ``str()`` is a sentence that says what to do."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else self.__class__.__name__


class BadRequest(RapidError):
    """The request is wrong and names the field; nothing was started."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.param = param
        self.code = code


class PromptTooLong(BadRequest):
    """The prompt and its answer do not fit the model's context."""

    def __init__(
        self, message: str, param: str | None = "messages", code: str = "context_length_exceeded"
    ) -> None:
        super().__init__(message, param, code)


class BodyTooLarge(BadRequest):
    """The request body is over the configured limit."""


class UnknownModel(BadRequest):
    """The model name is not served here."""

    def __init__(self, message: str, param: str = "model", code: str = "model_not_found") -> None:
        super().__init__(message, param, code)


class Unauthorized(RapidError):
    """The API key is missing or unknown."""


class Overloaded(RapidError):
    """No room now; ``retry_after_s`` says when to come back."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class LeaseNotFound(RapidError):
    """Recoverable: the lease was released or expired here; take a new one and prefill again."""


class DrafterHangs(LeaseNotFound):
    """Recoverable: the drafter has not answered in time, and may yet: give up both its leases.

    A block that still comes must not meet the verifier's lease, which has gone on meanwhile.
    """


class OutOfStep(RapidError):
    """A message names another position than the sequence's own; a bug or a duplicated call."""


class DrafterUnavailable(RapidError):
    """Recoverable: the answer can continue as the target's own distribution."""


class TargetUnavailable(RapidError):
    """No target replica could answer."""


class EngineFailed(RapidError):
    """A forward pass raised; its leases are released."""


class ConfigurationError(RapidError):
    """A configuration that cannot work, refused before anything starts."""
