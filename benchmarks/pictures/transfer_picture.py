"""The picture `docs/transfer-rules.svg`, which shows each transfer rule in two situations.

python -m benchmarks.pictures.transfer_picture
"""

from __future__ import annotations

import matplotlib

from benchmarks.reporting import ROOT

matplotlib.use("Agg")

import torch
from matplotlib import pyplot

from rapid.speculation.fusion import fuse_probs

ETA = 10.0
WORDS = ("maki", "sero", "dolu", "bani")
SITUATIONS = {
    "retrieval missed: the drafter is unsure,\nthe target has read it (maki)": (
        (0.70, 0.10, 0.10, 0.10),
        (0.25, 0.25, 0.25, 0.25),
    ),
    "the target is lost and leans to sero,\nthe drafter reads it (maki)": (
        (0.20, 0.60, 0.10, 0.10),
        (0.90, 0.04, 0.03, 0.03),
    ),
}
COLOURS = {"p": "#000000", "q": "#E69F00", "distill": "#0072B2", "boost": "#009E73"}


def main() -> None:
    style = {"svg.hashsalt": "rapid", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.1), sharey=True, layout="constrained")
        for axis, (title, (p, q)) in zip(axes, SITUATIONS.items(), strict=True):
            shown = {"p": p, "q": q}
            for transfer in ("distill", "boost"):
                fused = fuse_probs(
                    torch.tensor([p]).log(),
                    torch.tensor([q]),
                    temperature=1.0,
                    transfer=transfer,
                    eta=ETA,
                    plausibility=0.1,
                )
                shown[transfer] = tuple(fused[0].tolist())
            for number, (name, probs) in enumerate(shown.items()):
                places = [place + 0.2 * number - 0.3 for place in range(len(WORDS))]
                label = {"p": "p (target)", "q": "q (drafter)"}.get(name, f"p̂, {name}")
                axis.bar(places, probs, width=0.18, color=COLOURS[name], label=label)
            axis.set_xticks(range(len(WORDS)), WORDS)
            axis.set_title(title, fontsize=9)
            axis.set_xlabel("next token")
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        axes[0].set_ylabel("probability of the next token")
        axes[1].legend(frameon=False)
        out = ROOT / "docs" / "transfer-rules.svg"
        figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
