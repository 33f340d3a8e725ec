"""Break the parts of a running server one at a time, under load, and print what clients saw.

    make test-faults         every fault of one node, about half an hour on two quiet cores
    make test-faults-quick   the few faults of the short form, within five minutes; a row that fails
                             is tried once more
    make test-faults-nodes   the faults of several nodes, on test hosts of its own (Linux, as root)
    python -m tests.faults --only "kill Target engine" "stop proxy"
    python -m tests.faults --soak 30

The exit status is 1 if a row is not as it must be. A row that fails stops no other; a server that
does not come back is replaced by a new one.

The server is the shipped application of `serve_config.yaml` with two replicas a pool and its chunks
in a Qdrant, or in the shipped retriever where it is shared with a hostile tenant, on a private Ray
on loopback. The load is open-loop: seeded questions in all modes,
streamed and not, arrive as a Poisson process at half of what the server was measured to answer
(standard), at two and a half times that (overflow), and at half again (recovery); half of that load
where the server is shared with a hostile tenant. The fault comes early in the standard phase.

A row has the requests of the three phases; how many were answered, with the text of the same
request on a quiet server, or with another because the receipt says that the drafter or the
documents were lost ("without"); refused (429 and 503 with `Retry-After`), failed and malformed
errors; requests that nobody answered within a minute; connections that broke, and how many of their
requests got the same text by `Last-Event-ID`; what an idle server still held; how often `/ready`
denied what the server did, or promised what it did not; how long a stream's first token and its
next one were waited for; how long a broken engine was asked for leases; when the last request ended
that suffered, and when all replicas were back.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from tests.faults.breakages import QUICK, faults
from tests.faults.hosts import enter
from tests.faults.nodes import faults_of_nodes, served_on_hosts
from tests.faults.running import Report, run_all, soak
from tests.faults.service import served
from tests.faults.table import formatted
from tests.ports import free_port


def main() -> int:
    known = faults() | faults_of_nodes()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the short form")
    parser.add_argument("--nodes", action="store_true", help="several nodes, on hosts made here")
    parser.add_argument("--only", nargs="+", choices=known, metavar="FAULT")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="no fault, memory by process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the table to this file, as Markdown")
    asked = parser.parse_args()
    if asked.soak:
        with served(free_port()) as service:
            return asyncio.run(soak(service, asked.soak, asked.seed))
    if asked.nodes:
        enter()  # comes back in namespaces of its own
    known = faults_of_nodes() if asked.nodes else faults()
    names = asked.only or (QUICK if asked.quick else list(known))
    beside = {known[name].beside for name in names if known[name].allowed.slows}
    names = [*sorted(beside.difference(names)), *names]
    report = Report(names, out=asked.out)
    serving = served_on_hosts if asked.nodes else partial(served, free_port())
    try:
        scale, num_tries = (0.5, 2) if asked.quick else (1.0, 1)
        run_all(serving, report, known, scale, asked.seed, num_tries)
    finally:  # also after Ctrl-C
        print(f"\n{formatted(report.rows)}\n", flush=True)
        report.keep()
    return not report.is_good


if __name__ == "__main__":
    sys.exit(main())
