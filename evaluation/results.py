"""The file of a run: its configuration on the first line, then one JSON line per answer."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO, TypeGuard

from pydantic import Field, ValidationError

from rapid.config import Frozen
from rapid.errors import ConfigurationError

logger = logging.getLogger(__name__)

RESULTS = "results.jsonl"
"""Name of the file in the folder of a run."""

MADE = "made"
"""Configuration key of the date, commit and machine, which may change when a run is resumed."""

SHARD = "shard"
"""Configuration key of the part of the items that a run answers."""

Json = dict[str, Any]


class Result(Frozen):
    """One answer.

    Attributes:
        item: Id of the item. `item`, `system` and `condition` are the key; a run has each key once.
        prediction: Text of the answer (of the second pass, where there is one).
        reasoning: Text of the first pass, where there is a second one.
        scores: Scores by metric, in [0, 1].
        context_tokens: Length of the prompt with the whole context; 0 where it is not read.
        retrieved_tokens: Length of the prompt with the retrieved text; 0 where it is not read, and
            where a server does not report what its drafter read.
        tokens: Generated tokens, with the end-of-sequence token.
        refreshes: Number of further retrievals; `retrieved_tokens` and `evidence_found` are those
            of the first.
        by_position: For each position in the block, how often a draft was judged and kept there.
        ms: Milliseconds by phase: retrieval, target_prefill, drafter_prefill (of what a drafter
            reads; in `rag` the only prefill), draft, verify and decode, the loop's wall time
            without the prefills (tokens / decode is the paper's throughput). The phase refresh is
            a part of decode: the retrievals and prefills within it.
        evidence_found: Whether all evidence is in what the drafter reads; None where it is unknown.
        error: Why there is no answer; its scores are then 0.
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
        """The key by which a resumed run skips answers."""
        return self.item, self.system, self.condition


class Log:
    """A run's file, to which results are appended one whole line at a time.

    It is touched with the first result, so that a run that cannot start leaves nothing.

    Attributes:
        done: Keys that need no further answer. Results with an error are not among them: they are
            answered again, and the new line then counts instead of the earlier one.
    """

    def __init__(self, path: Path, configuration: Json) -> None:
        """Begin a run, resume it, or extend it by further systems and conditions.

        Raises:
            ConfigurationError: The file has another configuration; the message says which. Or it
                cannot be written where it shall be.
        """
        there = next(each for each in path.absolute().parents if each.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):
            raise ConfigurationError(f"--out: {there} is no folder that can be written to")
        results: list[Result] = []
        self._path = path
        self._file: TextIO | None = None
        self._first_line: Json | None = {"configuration": configuration}  # to write, if any
        self._is_new = not path.exists() or path.stat().st_size == 0
        if not self._is_new:
            known, results = read(path)
            if not is_extended(known, configuration):
                self._first_line = None
                if changes := differences(known, configuration):
                    raise ConfigurationError(
                        f"{path} was made with another configuration; give another --out, or:\n"
                        + "\n".join(f"  {each}" for each in changes)
                    )
        self.done = frozenset(each.key for each in results if each.error is None)

    def append(self, result: Result) -> None:
        """Append a result and flush the line, so that it survives the end of this process."""
        if self._file is None:
            self._file = self._open()
        self._file.write(json.dumps(result.model_dump(mode="json"), ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> TextIO:
        """Open the file at the end of its last whole line, with this run's configuration."""
        if self._is_new:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        elif self._first_line is not None:
            _replace_first_line(self._path, self._first_line)
        file = self._path.open("a", encoding="utf-8")
        if self._is_new:
            file.write(json.dumps(self._first_line, ensure_ascii=False) + "\n")
        elif not self._path.read_bytes().endswith(b"\n"):  # it ended in the middle of a line
            file.write("\n")
        return file


def read(path: Path) -> tuple[Json, list[Result]]:
    """Read the configuration of a run and its results, for each key the last line.

    The file may be compressed (``.gz``). A line that does not parse is logged and left out.

    Raises:
        ConfigurationError: The file cannot be read, or its first line is not a configuration.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    # Not splitlines(), because an answer may hold other line separators.
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


def shard_name(shard: tuple[int, int]) -> str:
    """Return the name of a part of a run's items, as ``1-of-8``; its folder has it, too."""
    return f"{shard[0]}-of-{shard[1]}"


def is_extended(old: Json, new: Json) -> bool:
    """Return whether `new` is `old` with more systems or conditions, and otherwise the same."""
    grown = ("systems", "conditions", "recipes")
    if not all(each in new.get(key, ()) for key in grown for each in old.get(key, ())):
        return False
    has_more = any(len(old.get(key, ())) < len(new.get(key, ())) for key in grown)
    return has_more and not differences(old | {key: new.get(key) for key in grown}, new)


def _replace_first_line(path: Path, line: Json) -> None:
    """Write `path` anew with another first line; a crash leaves the old file or the new one."""
    _, _, rest = path.read_text(encoding="utf-8").partition("\n")
    written = path.with_suffix(".new")
    written.write_text(f"{json.dumps(line, ensure_ascii=False)}\n{rest}", encoding="utf-8")
    written.replace(path)


def differences(old: object, new: object, key: str = "") -> list[str]:
    """Describe the differences of two configurations, a line each, without those of `MADE`."""
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
