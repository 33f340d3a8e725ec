"""Documents are written from what a Python installation carries."""

from __future__ import annotations

import types

from evaluation.texts.text_questions import document_names
from tests.evaluation.texts import write_documents
from tests.evaluation.texts.write_documents import cut, main, module_text, text_of


def test_a_document_is_cut_at_the_end_of_a_paragraph():
    assert cut("\n\none\n\ntwo\n\nthree", 10) == "one\n\ntwo\n"
    assert cut("one\n\ntwo", 100) == "one\n\ntwo\n"


def test_a_module_is_its_documented_members():
    module = types.ModuleType("ports", "Harbors.")

    class Bell:
        """A bell."""

        def ring(self, times):
            """Ring."""

        def _hidden(self):
            """Not shown."""

        def silent(self): ...

    module.__dict__.update(__all__=["Bell", "NUMBER"], Bell=Bell, NUMBER=9)
    assert module_text(module) == (
        "The module ports\n\nHarbors.\n\nBell()\n    A bell.\n\nBell.ring(self, times)\n    Ring."
    )


def test_topics_come_from_the_reference_behind_help():
    assert "Assignment statements" in text_of("topic assignment")


def test_the_package_carries_every_document(tmp_path, monkeypatch, capsys):
    assert sorted(write_documents.DOCUMENTS) == document_names()
    monkeypatch.setattr(write_documents, "DOCUMENTS", {"calls": ("topic calls", 2000)})
    monkeypatch.setattr("sys.argv", ["write_documents", str(tmp_path)])
    main()
    assert (tmp_path / "calls.txt").read_text().startswith("Calls\n")
