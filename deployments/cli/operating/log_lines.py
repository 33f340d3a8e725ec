"""Lines of Ray, Ray Serve and this application, as a person reads them: time, part and text."""

from __future__ import annotations

import json
import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Of a process whose output Ray repeats: "(ServeReplica:rapid:Ingress pid=9673, ip=10.0.0.2) ".
_PROCESS = re.compile(
    r"\((?P<part>raylet|autoscaler|[\w:. -]+?(?= pid=))(?: pid=\d+)?(?:, ip=[\w.:]+)?\) ?"
)
# Serve's: "INFO 2026-11-27 14:46:45,570 rapid_Ingress dtesqg5f 8c9fa17b-7fc8 -- text".
_SERVE = re.compile(
    r"(?P<level>[A-Z]+) (?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,\d+)? (?P<part>\S+) .*?-- "
)
# Ray's: "2026-11-27 14:46:36,803<TAB>INFO worker.py:1691 -- text".
_RAY = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,\d+)?\s+(?P<level>[A-Z]+) \S+:\d+ -- "
)
_QUIET = ("INFO", "DEBUG")  # levels that need no word


def shorten(line: str) -> str:
    """Return a line of a log without process ids, places in Ray's code and colours.

    What has none of the known forms, as the lines of a traceback, keeps its text.
    """
    text = _COLOUR.sub("", line)
    part = ""
    if found := _PROCESS.match(text):
        part, text = found["part"].rpartition(":")[2], text[found.end() :]
    time, level = "", ""
    if text.startswith("{") and (entry := _read_entry(text)) is not None:
        time = str(entry["asctime"]).partition(",")[0]
        level = str(entry.get("levelname", ""))
        part = part or str(entry.get("deployment") or entry.get("component_name") or "")
        text = "\n".join(str(entry[key]) for key in ("message", "exc_text") if entry.get(key))
    elif found := _SERVE.match(text):
        time, level, part = found["time"], found["level"], part or found["part"]
        text = text[found.end() :]
    elif found := _RAY.match(text):
        time, level, part = found["time"], found["level"], part or "ray"
        text = text[found.end() :]
    level = "" if level in _QUIET else level
    return "  ".join(each for each in (time, part, level, text) if each)


def _read_entry(text: str) -> dict[str, object] | None:
    """Return what ``logging_config.encoding: JSON`` has written, None if it is something else."""
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if "asctime" in entry and "message" in entry else None
