"""The exceptions of RAPID Serve, as one tree.

::

    RapidError
    ├── BadRequest              the request is invalid; names the field            400
    │   ├── PromptTooLong       the prompt exceeds the context, by how many tokens 400
    │   ├── GrammarTooComplex   the grammar cannot be followed (any further)       400
    │   ├── BodyTooLarge        the request body is over the limit                 413
    │   ├── BodyTooSlow         the request body did not come in time              408
    │   ├── UnsupportedEncoding the request body is compressed                     415
    │   ├── UnknownModel        the endpoint does not serve this model             404
    │   ├── UnknownDocument     the tenant has no such document, file or store     404
    │   ├── DocumentNotReady    a file has not been read yet, or cannot be         409
    │   └── UnknownKey          there is no API key with this id                   404
    ├── Unauthorized            the API key is missing or unknown                  401
    ├── Forbidden               the API key may not be used for this               403
    ├── Overloaded              the pools are full; says when to retry             503
    │   └── TooManyRequests     the tenant has too many requests; says when        429
    ├── LeaseNotFound           the lease was released, expired or never existed   503
    ├── OutOfStep               a message is for another position of the sequence  500
    ├── DrafterUnavailable      `auto` and `lossless` continue without a drafter   503
    ├── DrafterHangs            no draft block came in time                        503
    ├── TargetUnavailable       no target replica answered                         503
    │   └── TargetHangs         a target's engine gives no sign of life            503
    ├── OrchestratorLost        the process that ran the request died              503
    ├── CannotContinue          an answer came out differently the second time     503
    ├── RetrievalPending        documents are still being indexed for retrieval    503
    ├── RetrievalUnavailable    an explicit mode needs what retrieval did not give 503
    ├── DeadlinePassed          the caller's own deadline has passed               504
    ├── EngineFailed            an engine failed at a step, or is closed           500
    ├── LibraryUnavailable      the library's database or files are away           503
    │   └── LibraryFull         the disk of the library is full                    507
    └── ConfigurationError      the configuration is rejected before startup

Every class passes all its arguments to ``super().__init__``, so that it survives pickling between
processes. ``str(error)`` is the message for the user. `deployments.api.http.error_responses` maps
the tree to HTTP.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class RapidError(Exception):
    """Base of all errors; ``str()`` is a sentence for the user."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else self.__class__.__name__


class BadRequest(RapidError):
    """An invalid request, refused before anything was started; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.param = param
        self.code = code


class PromptTooLong(BadRequest):
    """A prompt that does not fit the model's context together with its answer."""

    def __init__(
        self, message: str, param: str | None = "messages", code: str = "context_length_exceeded"
    ) -> None:
        super().__init__(message, param, code)

    @classmethod
    def of(cls, max_context: int, why: str, param: str = "messages") -> PromptTooLong:
        """Return the error for a context of so many tokens, and `why` it does not suffice.

        Clients know it by its words: litellm by vLLM's sentence, with which it begins, and
        LangChain, whose SDK shows no code, by "prompt is too long", which is Anthropic's.
        """
        start = f"This model's maximum context length is {max_context} tokens"
        return cls(f"{start}. However, the prompt is too long: {why}", param)


class GrammarTooComplex(BadRequest):
    """A grammar beyond the limits of its library; in mid-answer it ends its choice as a length."""

    def __init__(
        self, message: str, param: str = "response_format", code: str | None = None
    ) -> None:
        super().__init__(message, param, code)


class BodyTooLarge(BadRequest):
    """A request body over the configured limit."""


class BodyTooSlow(BadRequest):
    """A request body that was not sent in time."""


class UnsupportedEncoding(BadRequest):
    """A request body in an encoding that is not read, such as gzip."""


class UnknownModel(BadRequest):
    """A model name that the endpoint does not serve."""

    def __init__(self, message: str, param: str = "model", code: str = "model_not_found") -> None:
        super().__init__(message, param, code)


class UnknownDocument(BadRequest):
    """A reference to a document that is unknown or another tenant's, which are not told apart."""


class DocumentNotReady(BadRequest):
    """A file whose text is not there: it is still being read, or it cannot be read."""


class UnknownKey(BadRequest):
    """An id that no API key has."""


class Unauthorized(RapidError):
    """A missing or unknown API key."""


class Forbidden(RapidError):
    """An API key without the scope that a route needs."""


class Overloaded(RapidError):
    """A lack of room for the request at this time.

    Attributes:
        retry_after_s: Seconds after which a retry makes sense; None where that was not measured.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class TooManyRequests(Overloaded):
    """A lack of room for more requests of this tenant, while there may be room for another's."""


class LeaseNotFound(RapidError):
    """A lease that was released or expired; recoverable with a new lease and a new prefill."""


class OutOfStep(RapidError):
    """A message for another position than the sequence's own: a bug or a duplicated call."""


class DrafterUnavailable(RapidError):
    """A missing or lost drafter; the answer can continue with the target's own distribution."""


class DrafterHangs(RapidError):
    """A drafter that has not answered in time but still may.

    Recoverable by giving up the leases of both drafter and verifier: a late block must not reach
    a verifier's lease that has moved on.
    """


class RetrievalPending(RapidError):
    """Documents that are still being indexed; the answer continues, and a later one finds them."""


class RetrievalUnavailable(RapidError):
    """Retrieval that failed or was not ready, for a mode that needs it; others continue without."""


class TargetUnavailable(RapidError):
    """A failure of all target replicas to answer."""


class TargetHangs(TargetUnavailable):
    """An engine that verifies and gives no sign of life; recoverable with a lease elsewhere."""


class OrchestratorLost(RapidError):
    """The loss of the process that ran a request; another one can run it again."""


class CannotContinue(RapidError):
    """An answer that was generated again and is not the one that its client has begun to read."""


class DeadlinePassed(RapidError):
    """An answer that came later than its caller has a use for it."""

    def __init__(self, message: str = "The x-request-deadline has passed.") -> None:
        super().__init__(message)


class EngineFailed(RapidError):
    """A step that failed, whose leases are released, or an engine that is closed after several.

    Recoverable with a new lease, elsewhere if there is another engine. The message never holds the
    text of another exception, which may name hosts or paths: the engine's log has that.
    """


class ConfigurationError(RapidError):
    """A configuration that cannot work, rejected before anything starts."""


class LibraryUnavailable(RapidError):
    """A database or a store of files that does not answer; nothing was changed."""


class LibraryFull(LibraryUnavailable):
    """A disk without room for what was to be kept; nothing was changed."""
