"""Model sizes of the embedded target and drafter, and the stages of their training."""

from dataclasses import dataclass
from pathlib import Path

from rapid.embedded import DRAFTER, TARGET
from rapid.embedded.generator import DocumentMix

FACTS_ONLY = DocumentMix(fact=0.8, recite=0.0, list=0.0, filler=0.2)
EVERYTHING = None  # the default mix of the document's kind


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the curriculum."""

    until: float  # share of the training time at which the stage ends
    lengths: tuple[int, ...]  # row lengths to draw from, in tokens
    mix: DocumentMix | None  # ingredients of the documents; None takes the default of their kind
    absent: float = 0.0  # share of questions that the text does not answer


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Model size and training settings of the embedded target or drafter."""

    path: Path
    hidden_size: int
    num_attention_heads: int
    stages: tuple[Stage, ...]
    # Share of rows in the drafter's form, with retrieved chunks instead of a document.
    retrieved: float
    seed: int  # of the first weights and of the documents
    tokens_per_step: int = 6144  # approximate batch size, in tokens
    learning_rate: float = 4e-3
    num_hidden_layers: int = 4
    num_key_value_heads: int = 2


TRAINING_CONFIGS = {
    "target": TrainingConfig(
        path=TARGET,
        hidden_size=128,
        num_attention_heads=4,
        stages=(
            Stage(0.10, (192,), FACTS_ONLY),
            Stage(0.20, (256, 384), EVERYTHING),
            Stage(0.36, (512, 768), EVERYTHING),
            Stage(0.66, (512, 768, 1024, 1536), EVERYTHING),
            Stage(1.00, (768, 1536, 2304, 4608), EVERYTHING, absent=0.25),
        ),
        retrieved=0.2,
        seed=3,
    ),
    "drafter": TrainingConfig(
        path=DRAFTER,
        hidden_size=192,
        num_attention_heads=6,
        stages=(
            Stage(0.12, (192,), FACTS_ONLY),
            Stage(0.30, (256, 384), EVERYTHING),
            Stage(0.74, (512, 640, 768), EVERYTHING),
            Stage(1.00, (640, 768), EVERYTHING, absent=0.25),
        ),
        retrieved=0.7,
        seed=2,
    ),
}
