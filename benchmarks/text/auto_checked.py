"""Does `auto` of the product decide and answer as `auto_on_text` composed it?

    python -m benchmarks.text.auto_checked 12 --target TARGET.gguf

asks some of the kept questions in this process: `auto` has to choose what was kept, and to give the
text of the mode that it chose. The target drafts for itself, unless there is a `--drafter`. With
`--least 0.5` the drafter is asked first, with these least log odds of its yes, and `--name` is a
kept result with its words. It prints a line for each question, and keeps nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json

from benchmarks.reporting import RESULTS
from evaluation.drivers.prompter import retrieval_config
from evaluation.loaders import load_items
from evaluation.tasks import load_task
from rapid.config import EngineConfig
from rapid.pair import open_pair

CHECKED_CONTEXT = 16_384  # tokens of the longest document, and room for retrieved text


def check(options: argparse.Namespace) -> None:
    """Ask the product itself, and compare its decisions with the kept ones, and its texts."""
    kept = json.loads((RESULTS / f"{options.name}.json").read_text())["decisions"]
    fuses = {each["item"]: each["fuses"] for each in kept if each["condition"] == "as is"}
    if options.least is not None:
        words = {each["item"]: each["log_odds"] for each in kept if each["condition"] == "as is"}
        fuses = {item: yes and words[item] >= options.least for item, yes in fuses.items()}
    task = load_task("real-text")
    items = sorted(load_items(task), key=lambda item: hashlib.sha256(item.id.encode()).hexdigest())
    told = retrieval_config(task.retrieval)
    retrieval = told.model_copy(update={"budget_tokens": task.retrieval.tokens})
    models = [
        EngineConfig(model=model, dtype="bfloat16", max_context=CHECKED_CONTEXT, max_leases=4)
        for model in (options.target, options.drafter)
        if model is not None
    ]
    drafter = models[1] if len(models) > 1 else None
    asked_first = {"answerable_log_odds": options.least, "retrieval": retrieval}
    with open_pair(models[0], drafter=drafter, **asked_first) as pair:
        for item in items[: options.questions]:
            texts, modes = {}, {}
            for mode in ("auto", "plain", "fused"):
                answer = pair.answer(
                    item.messages[-1].content,
                    documents=[item.document],
                    mode=mode,
                    max_tokens=task.max_tokens,
                    temperature=0.0,
                )
                texts[mode], modes[mode] = answer.text, answer.receipt.mode
            wanted = "fused" if fuses[item.id] else "plain"
            same = texts["auto"] == texts[wanted]
            print(
                f"{item.id}: auto is {modes['auto']}, kept {wanted}, "
                f"{'the same text' if same else 'another text'}, "
                f"plain and fused {'agree' if texts['plain'] == texts['fused'] else 'differ'}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", type=int, help="ask so many")
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--least", type=float, help="log odds of the drafter's yes; asks it first")
    parser.add_argument("--name", default="auto-on-text", help="of the kept result")
    check(parser.parse_args())


if __name__ == "__main__":
    main()
