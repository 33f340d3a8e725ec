"""Keep a file on the server and ask about it, with the OpenAI SDK alone.

    python examples/documents.py FILE 'What is ...?'

The file is uploaded and read once, and asked about twice by its id: the second time the server has
read it before. Then it is deleted.
"""

import argparse
import time

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="text, Markdown, HTML, PDF or DOCX")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="local", help="an API key, if the server wants one")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.key)
    model = next(iter(client.models.list())).id

    with open(options.file, "rb") as content:
        file = client.files.create(file=content, purpose="user_data")
    while file.status == "uploaded":
        time.sleep(0.2)
        file = client.files.retrieve(file.id)
    if file.status == "error":
        raise SystemExit(f"{file.filename}: {file.status_details}")
    print(f"{file.filename} is read: {file.model_extra['rapid']['characters']} characters")

    store = client.vector_stores.create(name="example", file_ids=[file.id])
    while store.status != "completed":
        time.sleep(0.2)
        store = client.vector_stores.retrieve(store.id)
    best = client.vector_stores.search(store.id, query=options.question, max_num_results=1)
    for hit in best.data:
        first, last = hit.model_extra["rapid"]["lines"]
        print(f"nearest passage, lines {first}-{last}: {hit.content[0].text.strip()}")

    for _ in range(2):
        began = time.perf_counter()
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": options.question}],
            extra_body={"rapid": {"file_ids": [file.id], "citations": True}},
        )
        took_s = time.perf_counter() - began
        print(f"> {options.question} ({took_s:.2f} s)\n{answer.choices[0].message.content}")
        for citation in answer.model_extra["rapid"].get("citations") or ():
            print(f"  {citation['evidence']}: {citation['document']}: {citation['quote'].strip()}")

    client.vector_stores.delete(store.id)
    certificate = client.files.delete(file.id).model_extra["rapid"]
    while certificate["state"] != "gone":  # engines drop its KV between two steps
        time.sleep(0.2)
        certificate = client.files.delete(file.id).model_extra["rapid"]
    for each in certificate["searched"]:
        print(f"{each['place']}: {each['removed']} removed, {each['bytes']} bytes searched")
    print("deleted; left:", [each.id for each in client.files.list()])


if __name__ == "__main__":
    main()
