"""Errors to HTTP."""

from __future__ import annotations

import inspect

import pytest

from deployments.api.http.error_responses import http_error
from rapid import errors
from retrieval.retrieval_errors import StoreUnavailable

STATUS = {
    "BadRequest": 400,
    "PromptTooLong": 400,
    "GrammarTooComplex": 400,
    "BodyTooLarge": 413,
    "BodyTooSlow": 408,
    "UnsupportedEncoding": 415,
    "UnknownModel": 404,
    "UnknownDocument": 404,
    "DocumentNotReady": 409,
    "UnknownKey": 404,
    "Unauthorized": 401,
    "Forbidden": 403,
    "Overloaded": 503,
    "TooManyRequests": 429,
    "LeaseNotFound": 503,
    "DrafterHangs": 503,
    "OutOfStep": 500,
    "DrafterUnavailable": 503,
    "RetrievalPending": 503,
    "RetrievalUnavailable": 503,
    "TargetUnavailable": 503,
    "TargetHangs": 503,
    "OrchestratorLost": 503,
    "CannotContinue": 503,
    "DeadlinePassed": 504,
    "EngineFailed": 500,
    "LibraryUnavailable": 503,
    "LibraryFull": 507,
    "ConfigurationError": 500,
    "RapidError": 503,
}
CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == "rapid.errors"
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_of_the_tree_has_its_status(cls):
    error = http_error(cls("What to do."))
    assert error.status == STATUS[cls.__name__]
    body = error.body["error"]
    assert set(body) == {"message", "type", "param", "code", "retryable"}
    assert (body["message"] == "What to do.") == (error.status != 500)
    assert body["retryable"] is (error.status in (408, 429, 503))
    assert ("retry-after" in error.headers) == (error.status in (408, 429, 503))
    assert (body["type"] == "server_error") == (error.status >= 500)


def test_an_error_of_another_package_is_known_by_its_ancestry():
    assert http_error(StoreUnavailable("Qdrant is away.")).status == 503


def test_an_overload_says_when_to_retry():
    mapped = http_error(errors.Overloaded("Full.", 3.2))
    assert mapped.body["error"]["message"] == "Full."
    assert mapped.headers == {"retry-after": "4"}


def test_an_error_names_the_field_at_fault():
    error = http_error(errors.BadRequest("No.", "n"))
    assert (error.status, error.body["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("cls", [KeyError, errors.EngineFailed, errors.OutOfStep])
def test_a_bug_does_not_speak(cls):
    raised = cls("secret")
    if not isinstance(raised, errors.RapidError):
        raised.code = "secret"  # as errors of databases have
    error = http_error(raised)
    assert error.status == 500
    assert "secret" not in str(error.body)
    assert "x-request-id" in error.body["error"]["message"]
