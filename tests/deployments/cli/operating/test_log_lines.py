"""Log lines as a person reads them."""

from __future__ import annotations

import json

import pytest

from deployments.cli.operating.log_lines import shorten

_AT = "2026-11-27 14:47:04"


@pytest.mark.parametrize(
    ("line", "read"),
    [
        (
            f"{_AT},803\tINFO worker.py:1691 -- Using address local",
            f"{_AT}  ray  Using address local",
        ),
        (f"{_AT},803\tWARNING token.py:85 -- Enabled.", f"{_AT}  ray  WARNING  Enabled."),
        (f"INFO {_AT},570 serve 9032 -- Started Serve", f"{_AT}  serve  Started Serve"),
        (
            "\x1b[36m(ServeReplica:rapid:Ingress pid=9673, ip=10.0.0.2)\x1b[0m "
            f"INFO {_AT},575 rapid_Ingress dtesqg5f 8c9fa17b -- request 8c9fa17b: failed",
            f"{_AT}  Ingress  request 8c9fa17b: failed",
        ),
        ("\x1b[33m(raylet)\x1b[0m Task failed.", "raylet  Task failed."),
        (
            '\x1b[36m(ProxyActor pid=9406)\x1b[0m   File "a.py", line 1',
            'ProxyActor    File "a.py", line 1',
        ),
        ('{"asctime": broken', '{"asctime": broken'),
        ("(a bracket) of others", "(a bracket) of others"),
        ("[1, 2]", "[1, 2]"),
        ("", ""),
    ],
)
def test_forms(line, read):
    assert shorten(line) == read


def test_json_has_its_traceback():
    entry = {
        "asctime": f"{_AT},132",
        "levelname": "ERROR",
        "message": "no answer",
        "deployment": "rapid_Target",
        "exc_text": "Traceback",
    }
    assert shorten(json.dumps(entry)) == f"{_AT}  rapid_Target  ERROR  no answer\nTraceback"
