"""Models of a simulated fleet, timed by the roofline, and the traces of its requests."""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from dataclasses import dataclass, field, replace

from cluster.routing import Need
from rapid.planning.gpus import GPUS
from rapid.planning.known_models import KNOWN_SHAPES
from rapid.planning.plan import COMPUTE_SHARE, Replica

PAGE = 16
QUESTION = 64  # tokens of a question


@dataclass(frozen=True)
class Model:
    """A model on its GPUs, by the roofline.

    Attributes:
        name: A name of `KNOWN_SHAPES`.
        gpus: GPUs of a replica.
        start_s: Seconds from the decision to a replica that runs.
        target_ongoing: Requests that a replica should have (`target_ongoing_requests`).
        up_s: Seconds of high load before replicas are added (`upscale_delay_s`).
        down_s: Seconds of low load before replicas are removed (`downscale_delay_s`).
        max_leases: Requests that it takes.
        pages: KV pages of a replica.
        weights_s: Seconds of a step that reads the weights alone.
        token_s: Seconds that a token of KV adds to a step.
    """

    name: str
    gpus: int
    start_s: float
    target_ongoing: float
    up_s: float
    down_s: float
    max_leases: int = 16
    replica: Replica = field(init=False)
    pages: int = field(init=False)
    weights_s: float = field(init=False)
    token_s: float = field(init=False)

    def __post_init__(self) -> None:
        one = Replica(KNOWN_SHAPES[self.name][1], GPUS["h100-sxm"], 0, self.gpus)
        room = one.usable - one.need(self.max_leases).total
        set_ = object.__setattr__
        set_(self, "replica", one)
        set_(self, "pages", int(room / one.shape.kv_bytes_per_token(2) / PAGE))
        set_(self, "weights_s", one.step_s(1))
        set_(self, "token_s", replace(one, context=100_000).step_s(1) / 1e5 - one.step_s(1) / 1e5)

    @property
    def read_tokens_per_s(self) -> float:
        """The usual speed of reading, as an engine would measure it."""
        return 40_000 / self.prefill_s(0, 40_000)

    def prefill_s(self, start: int, stop: int) -> float:
        """Seconds of reading the tokens from `start` to `stop` of a prompt."""
        shape, flops = self.replica.shape, self.gpus * self.replica.gpu.flops * COMPUTE_SHARE
        return (shape.prefill_flops(stop) - shape.prefill_flops(start)) / flops


@dataclass(frozen=True)
class Request:
    """A request of the trace: a question about a document, asked at `at` seconds."""

    number: int
    at: float
    document: str
    document_tokens: int
    answer_tokens: int

    @property
    def need(self) -> Need:
        """The pages and leases that this request takes of a target."""
        return Need(self.document, self.document_tokens + QUESTION, self.answer_tokens)


def trace(seconds: float, rate: float, num_documents: int, seed: int) -> list[Request]:
    """Return requests: Poisson, three times as many in every third tenth, documents by Zipf.

    A document has 8K to 120K tokens, log-normal around 40K, and an answer 100 to 500.
    """
    draw = random.Random(seed)
    lengths = [
        int(min(max(draw.lognormvariate(10.6, 0.7), 8e3), 12e4)) for _ in range(num_documents)
    ]
    shares = list(itertools.accumulate(1 / (rank + 1) for rank in range(num_documents)))
    requests: list[Request] = []
    now = 0.0
    while True:
        is_burst = int(10 * now / seconds) % 3 == 1
        now += draw.expovariate(rate * (3 if is_burst else 1))
        if now >= seconds:
            return requests
        rank = bisect(shares, draw.random() * shares[-1])
        answer = draw.randint(100, 500)
        requests.append(Request(len(requests), now, f"{rank:08d}", lengths[rank], answer))
