"""The in-process API: two models that stay open for questions about documents.

::

    with rapid.open("embedded:target", drafter="embedded:drafter") as pair:
        answer = pair.answer("What is the banner of Tezawe?", documents=[text], mode="fused")
        print(answer.text, answer.receipt)

A question takes the same path as over HTTP (`rapid.answering.request`), with the same modes,
receipts and errors. The KV of a document is kept until its room is needed, so a second question
about it skips the prefill. Methods block; they may be called from within a notebook's event loop
and from several threads.
"""
