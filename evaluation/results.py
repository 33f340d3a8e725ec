"""What a run keeps: one JSON line per answer, after a first line that says how it was made."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeGuard

from pydantic import Field, ValidationError

from rapid.config import Frozen
from rapid.errors import ConfigurationError

logger = logging.getLogger(__name__)

MADE = "made"
"""Key of a configuration's date, commit and machine, in which a resumed run may differ."""

Json = dict[str, Any]


class Result(Frozen):
    """One answer.

    Attributes:
        item, system, condition: its key; a run has each once.
        prediction: the answer's text (of the second pass, where there is one).
        scores: by metric, in [0, 1].
        groups: of the item.
        context_tokens, retrieved_tokens: lengths of the two prompts; 0 where one is not read, and
            where a server does not tell what its drafter read.
        tokens: generated, with the end-of-sequence token.
        refreshes: times that was retrieved again; `retrieved_tokens` and `evidence_found` are of
            the first.
        by_position: per position in the block: how often a draft was judged there, and kept.
        ms: retrieval, target_prefill, drafter_prefill (of what a drafter reads; in `rag` the only
            one), draft, verify and decode: the loop's wall time without the prefills (tokens /
            decode is the paper's throughput); refresh, a part of decode: retrievals and prefills
            within it.
        evidence_found: all evidence is in what the drafter reads; None where it is not known.
        error: why there is no answer; its scores are then 0.
    """

    item: str
    system: str
    condition: str = "as is"
    prediction: str = ""
    reasoning: str | None = None
    scores: dict[str, float] = Field(default_factory=dict)
    groups: dict[str, str] = Field(default_factory=dict)
    seed: int = 0
    context_tokens: int = 0
    retrieved_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    refreshes: int = 0
    by_position: tuple[tuple[int, int], ...] = ()
    ms: dict[str, float] = Field(default_factory=dict)
    evidence_found: bool | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What a resumed run skips."""
        return self.item, self.system, self.condition


class Log:
    """Appends results to a run's file, one whole line at a time.

    Attributes:
        done: keys that need no answer any more. A result with an error does: another try may end
            well, and its line then counts instead of the earlier one.
    """

    def __init__(self, path: Path, configuration: Json) -> None:
        """Begin a run, or go on with it.

        Raises:
            ConfigurationError: the file is of another configuration; all that differs is told.
        """
        results: list[Result] = []
        is_new = not path.exists() or path.stat().st_size == 0
        if not is_new:
            known, results = read(path)
            if changes := differences(known, configuration):
                raise ConfigurationError(
                    f"{path} was made with another configuration; give another --out, or:\n"
                    + "\n".join(f"  {each}" for each in changes)
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        self.done = frozenset(each.key for each in results if each.error is None)
        self._file = path.open("a", encoding="utf-8")
        if is_new:
            self._write({"configuration": configuration})
        elif not path.read_bytes().endswith(b"\n"):  # the run was ended in the middle of a line
            self._file.write("\n")

    def append(self, result: Result) -> None:
        """Add a line; it survives the end of this process."""
        self._write(result.model_dump(mode="json"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: Json) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()


def read(path: Path) -> tuple[Json, list[Result]]:
    """The configuration of a run and its results, each key once: its last line counts.

    The file may be compressed (``.gz``). A line that does not parse is named in the log, and left
    out.

    Raises:
        ConfigurationError: there is no such file, or its first line is no configuration.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    # Not splitlines(): an answer may hold other line separators.
    lines = data.decode("utf-8", errors="replace").split("\n")
    try:
        configuration: Json = json.loads(lines[0])["configuration"]
    except (IndexError, ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"{path}: line 1 is no configuration of a run; move the file away to begin anew"
        ) from None
    results: dict[tuple[str, str, str], Result] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            result = Result.model_validate_json(line)
        except ValidationError as error:
            what = error.errors()[0]["msg"]
            logger.warning("%s: line %d is no result and left out (%s)", path, number, what)
        else:
            results[result.key] = result
    return configuration, list(results.values())


def differences(old: object, new: object, key: str = "") -> list[str]:
    """Where two configurations differ, a line each; `MADE` may."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [each for each in {**old, **new} if key or each != MADE]
        return [
            found
            for each in keys
            for found in differences(old.get(each), new.get(each), f"{key}.{each}".lstrip("."))
        ]
    if _is_list(old) and _is_list(new) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [f for i, (a, b) in pairs for f in differences(a, b, f"{key}.{i}")]
    if old == new:
        return []
    return [f"{key}: {_short(old)} then, {_short(new)} now"]


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _short(value: object) -> str:
    if _is_list(value) and all(isinstance(each, Mapping) for each in value):
        return ", ".join(str(each.get("name")) for each in value if isinstance(each, Mapping))
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
