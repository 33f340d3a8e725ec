"""Kill every process of the shipped application at once, again and again, while files are uploaded.

    make test-kills                        twenty kills, a quarter of an hour; keeps the result
    python -m tests.faults.kills --quick   two, about three minutes; keeps nothing

``rapid serve`` runs the shipped `serve_config.yaml` on a port and in a folder of its own, where
passages are kept as well. Everything that it starts is in one PID namespace: Ray, all replicas,
engines, the retriever and readers of files. Killing the namespace's first process is SIGKILL for
all of them at the same moment, and for nothing else. Then it is started again on what is left.

Of 300 files fifteen are uploaded and put into a vector store between two kills, four at once.
There are texts, pages of HTML and broken PDFs, of 1 KB to 8 MB; targets read some in advance, and
some are deleted again. A kill comes within two seconds after a random one was acknowledged; what it
kept from being acknowledged is uploaded again.

At the end every acknowledged file is listed, `completed` or `failed` for a reason, of the same
bytes, and found by its own phrase; no deleted one is there. What ``rapid documents verify`` finds
is repaired, after which it finds nothing, and nothing else lies about: in the folder of the files,
that of the passages, and that for temporary files.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from sqlalchemy import func, select

from benchmarks.reporting import ROOT, keep, table
from library.library_access import Library
from library.library_config import LibraryConfig
from library.storage.schema import JobRow
from library.upkeep import verify
from tests.faults.service import is_alive, temporary
from tests.ports import free_port
from tests.ray_cluster import wait_until

START_S = 600.0  # for the application to be ready, and for its work to be done
PER_KILL, AT_ONCE = 15, 4  # uploads
KINDS = {"text": 12, "page": 4, "broken": 2, "long": 2}  # how often each comes
SYLLABLES = ("ba", "do", "fi", "gu", "ke", "lo", "mi", "nu", "ra", "so")  # for the digits


@dataclass
class Upload:
    """A file, and what was acknowledged of it.

    Attributes:
        kind: See `KINDS`.
        is_unwanted: Whether it is deleted once it is in the store.
        is_read_ahead: Whether a target shall read it.
        file_id: Its id, once the upload was acknowledged.
        is_in_store: Whether being put into the store was acknowledged.
        fate: ``kept``, ``deleted``, or ``unknown`` where the deletion was not acknowledged.
    """

    number: int
    kind: str
    is_unwanted: bool
    is_read_ahead: bool
    file_id: str = ""
    is_in_store: bool = False
    fate: str = "kept"

    @classmethod
    def draw(cls, number: int, rng: random.Random) -> Upload:
        """Draw what kind of a file it is, and what is done with it."""
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        return cls(number, kind, rng.random() < 0.15, rng.random() < 0.3)

    @property
    def name(self) -> str:
        """A word that is in no other file."""
        return "".join(SYLLABLES[int(digit)] for digit in f"{self.number:04}").capitalize()

    @property
    def phrase(self) -> str:
        """What is said in this file alone."""
        return f"The keeper of {self.name} counts {self.number} lamps."

    @property
    def file(self) -> tuple[str, bytes]:
        """Its name and bytes."""
        if self.kind == "broken":
            return f"{self.number}.pdf", b"%PDF-1.7\nbroken " + self.name.encode() * 2**20
        days = range(4000 if self.kind == "long" else 20)
        text = "\n\n".join(f"Day {day}: {self.name} has rain and no mail." for day in days)
        if self.kind == "page":
            return f"{self.number}.html", f"<p>{text}</p><p>{self.phrase}</p>".encode()
        return f"{self.number}.txt", f"{text}\n\n{self.phrase}\n".encode()


class Application:
    """The application in a folder, which is started and killed again and again."""

    def __init__(self, folder: Path) -> None:
        """Write its configuration, which is the shipped one but for its port and its folders."""
        self.folder, port = folder, free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        settings["http_options"]["port"] = port
        args = settings["applications"][0]["args"]
        args["retriever"]["retrieval"]["store"]["folder"] = str(self.passages)
        (folder / "serve_config.yaml").write_text(yaml.safe_dump(settings))
        self.temporary.mkdir()

    @property
    def temporary(self) -> Path:
        """Where its temporary files are."""
        return self.folder / "tmp"

    @property
    def passages(self) -> Path:
        """Where its retriever keeps passages."""
        return self.folder / "passages"

    @property
    def library(self) -> LibraryConfig:
        """Its library."""
        return LibraryConfig(folder=self.folder / ".run" / "library")

    def start(self) -> float:
        """Start it, and return the seconds until it was ready."""
        began = time.monotonic()
        own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        own += ["--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        command = [str(Path(sys.executable).parent / "rapid"), "serve", "serve_config.yaml"]
        places = {"TMPDIR": self.temporary, "RAY_TMPDIR": self.folder, "PYTHONPATH": ROOT}
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                ["unshare", *own, *command],
                cwd=self.folder,
                env=os.environ | {name: str(each) for name, each in places.items()},
                stdout=output,
                stderr=output,
            )
        wait_until(self._is_ready, START_S, 0.25)
        return time.monotonic() - began

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            raise SystemExit((self.folder / "output").read_text()[-2000:])
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        return False

    def kill(self) -> int:
        """Kill all of its processes; return how many there were."""
        if self._process.poll() is not None:
            return 0
        processes = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        wait_until(lambda: not any(map(is_alive, processes)), 60)
        return len(processes)


async def send(http: httpx.AsyncClient, store: str, upload: Upload) -> None:
    """Upload a file, put it into the store, and perhaps delete it.

    Raises:
        TransportError: The application was killed.
    """
    form: dict[str, Any] = {"purpose": (None, "user_data"), "file": upload.file}
    if upload.is_read_ahead:
        form["prefill"] = (None, "true")
    upload.file_id = (await call(http, "POST", "/v1/files", files=form))["id"]
    await put(http, store, upload)
    if upload.is_unwanted:
        upload.fate = "unknown"
        await call(http, "DELETE", f"/v1/files/{upload.file_id}")
        upload.fate = "deleted"


async def put(http: httpx.AsyncClient, store: str, upload: Upload) -> None:
    """Put an uploaded file into the store."""
    await call(http, "POST", f"/v1/vector_stores/{store}/files", json={"file_id": upload.file_id})
    upload.is_in_store = True


async def call(http: httpx.AsyncClient, method: str, path: str, **sent: Any) -> Any:
    """Return the body of an answer, which must not be an error."""
    response = await http.request(method, path, **sent)
    assert response.status_code == 200, f"{method} {path}: {response.status_code} {response.text}"
    return response.json()


async def list_all(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Return everything of a list by id."""
    found: dict[str, Any] = {}
    page: dict[str, Any] = {"has_more": True, "last_id": None}
    while page["has_more"]:
        after = f"&after={page['last_id']}" if page["last_id"] else ""
        page = await call(http, "GET", f"{path}?limit=100{after}")
        found |= {each["id"]: each for each in page["data"]}
    return found


async def upload_all(
    application: Application, store: str, waiting: deque[Upload], kill_after: tuple[int, float]
) -> int:
    """Upload files, and kill the application meanwhile; return how many processes it had.

    What was not acknowledged waits again.

    Args:
        application: It runs.
        store: The vector store.
        waiting: The files.
        kill_after: How many files are to be acknowledged before the kill, and how many seconds are
            to pass then.
    """
    num_left, wait_s = kill_after
    is_time = asyncio.Event()

    async def work(http: httpx.AsyncClient) -> None:
        nonlocal num_left
        while waiting:
            upload = waiting.popleft()
            try:
                await send(http, store, upload)
            except httpx.TransportError:
                return
            finally:
                if not upload.file_id:
                    waiting.append(upload)
                num_left -= 1
                if num_left <= 0:
                    is_time.set()
        is_time.set()

    async with httpx.AsyncClient(base_url=application.url, timeout=START_S) as http:
        working = asyncio.gather(*(work(http) for _ in range(AT_ONCE)))
        await is_time.wait()
        await asyncio.sleep(wait_s)
        num_killed = await asyncio.to_thread(application.kill)
        await working
    return num_killed


async def find_faults(
    http: httpx.AsyncClient, store: str, uploads: Sequence[Upload]
) -> AsyncIterator[tuple[Upload, str]]:
    """Yield what is not as it was acknowledged, once all work is done."""
    path = f"/v1/vector_stores/{store}"
    entries = await list_all(http, f"{path}/files")
    files = await list_all(http, "/v1/files")
    for each in uploads:
        if each.fate == "deleted" and each.file_id in files:
            yield each, "it is listed"
        if each.fate != "kept":
            continue
        if each.file_id not in files:
            yield each, "it is not listed"
            continue
        content = await http.get(f"/v1/files/{each.file_id}/content")
        if content.content != each.file[1]:
            yield each, "it has other bytes"
        entry = entries.get(each.file_id, {"status": "missing", "last_error": None})
        told = entry["status"], bool((entry["last_error"] or {}).get("message"))
        if told != (("failed", True) if each.kind == "broken" else ("completed", False)):
            yield each, f"it is {told[0]} in the store, for {'a' if told[1] else 'no'} reason"
        if each.kind != "broken":
            asked = {"query": each.phrase, "max_num_results": 1}
            hits = (await call(http, "POST", f"{path}/search", json=asked))["data"]
            if [hit["file_id"] for hit in hits] != [each.file_id]:
                yield each, "it is not found by its phrase"


async def count_jobs(library: Library) -> int:
    """Return how many jobs are left."""
    async with library.database.read() as session:
        return int(await session.scalar(select(func.count()).select_from(JobRow)) or 0)


async def find_litter(
    application: Application, library: Library, num_texts: int
) -> AsyncIterator[str]:
    """Yield what lies in the application's folders and belongs to nothing.

    Args:
        application: It does not run.
        library: Its library.
        num_texts: How many texts are searched.
    """
    names = {each.name for each in await library.blobs.list_blobs()}
    for path in _list_files(application.library.folder / "files"):
        if path not in names:
            yield f"{path} is in the library's folder"
    for path in _list_files(application.temporary):
        if not path.startswith("torchinductor"):  # its cache
            yield f"{path} is in the folder for temporary files"
    num_passages = len({*_list_files(application.passages)} - {"lock"})
    if num_passages != num_texts:
        yield f"there are passages of {num_passages} texts, and {num_texts} are searched"


def _list_files(folder: Path) -> list[str]:
    return [str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()]


@dataclass
class Found:
    """What a run has found.

    Attributes:
        rounds: For each start the seconds until the application was ready, the files that were
            acknowledged before it was killed, and the number of processes killed.
        wrong: What is not as it must be.
        counts: What became of the files.
        repaired: What ``verify`` found and repaired, by kind.
    """

    rounds: list[tuple[float, int, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)


async def run(application: Application, num_kills: int, seed: int) -> Found:
    """Upload and kill, then look at everything; the application is killed once more at the end."""
    rng, found = random.Random(seed), Found()
    uploads = [Upload.draw(number, rng) for number in range(num_kills * PER_KILL)]
    waiting, store = deque[Upload](), ""
    for number in range(num_kills):
        ready_s = await asyncio.to_thread(application.start)
        async with httpx.AsyncClient(base_url=application.url, timeout=START_S) as http:
            store = store or (await call(http, "POST", "/v1/vector_stores", json={}))["id"]
        waiting += uploads[number * PER_KILL : (number + 1) * PER_KILL]
        kill_after = rng.randrange(1, PER_KILL), 2.0 * rng.random() ** 4  # mostly at once
        num_killed = await upload_all(application, store, waiting, kill_after)
        num_told = sum(bool(each.file_id) for each in uploads)
        found.rounds.append((ready_s, num_told, num_killed))
        print(f"kill {number + 1}: {num_told} acknowledged, {num_killed} processes", flush=True)
    await asyncio.to_thread(application.start)
    library = await Library.open(application.library)
    async with httpx.AsyncClient(base_url=application.url, timeout=START_S) as http:
        entries = await list_all(http, f"/v1/vector_stores/{store}/files")
        for each in uploads:
            if each.is_in_store and each.fate == "kept" and each.file_id not in entries:
                found.wrong.append(f"{each}: it is not in the store")
            if not each.file_id:
                await send(http, store, each)
            elif each.fate == "kept":
                await put(http, store, each)
        deadline = time.monotonic() + START_S
        while await count_jobs(library) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        found.wrong += [f"{each}: {what}" async for each, what in find_faults(http, store, uploads)]
        entries = await list_all(http, f"/v1/vector_stores/{store}/files")
        files = await list_all(http, "/v1/files")
    await asyncio.to_thread(application.kill)
    fates = Counter(each.fate for each in uploads)
    found.counts = {**fates, **Counter(each["status"] for each in entries.values())}
    searched = {
        each["filename"]
        for each in files.values()
        if each["status"] == "processed" and (each["id"] in entries or "prefill" in each["rapid"])
    }
    repaired = await verify(library, repairs=True, young_s=0)
    found.repaired = {**Counter(each.kind for each in repaired)}
    found.wrong += [f"left by verify: {each}" for each in await verify(library, young_s=0)]
    found.wrong += [each async for each in find_litter(application, library, len(searched))]
    await library.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two kills; keeps nothing")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    num_kills = 2 if asked.quick else 20
    with temporary() as folder:
        application = Application(folder)
        try:
            found = asyncio.run(run(application, num_kills, asked.seed))
        finally:
            application.kill()
    rows = [[f"{s:.0f}", num_told, killed] for s, num_told, killed in found.rounds]
    text = table(["ready after s", "acknowledged at the kill", "processes killed"], rows)
    text += "\n" + table(["at the end", "files"], [*found.counts.items()])
    text += "\n" + table(["found and repaired by verify", ""], [*found.repaired.items()])
    text += "\n" + "\n".join(found.wrong or ["Nothing was wrong."]) + "\n"
    title = f"{num_kills * PER_KILL} uploads, and everything killed {num_kills} times during them"
    report = {"settings": {"seed": asked.seed}, "found": asdict(found)}
    keep(None if asked.quick else "kills", title, text, report)
    return bool(found.wrong)


if __name__ == "__main__":
    sys.exit(main())
