// A question as programs ask it, for the shell and for Python. The key is never part of it.

/** Returns the body of a request without what only this page needs. */
function plain(body) {
  const { stream, stream_options, ...rest } = body;
  const { explain, progress, ...rapid } = rest.rapid;
  return { ...rest, rapid };
}

export function asCurl(base, body) {
  const text = JSON.stringify(plain(body), null, 2).replaceAll("'", `'\\''`);
  return [
    `curl '${new URL("v1/chat/completions", base)}' \\`,
    `  -H "Authorization: Bearer \${RAPID_API_KEY:-local}" \\`,
    `  -H 'Content-Type: application/json' \\`,
    `  -d '${text}'`,
    "",
  ].join("\n");
}

export function asPython(base, body) {
  const { rapid, ...fields } = plain(body);
  const given = Object.entries(fields).map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    "client = OpenAI(",
    `    base_url=${literal(String(new URL("v1", base)))},`,
    `    api_key=os.environ.get("RAPID_API_KEY", "local"),`,
    ")",
    "answer = client.chat.completions.create(",
    ...given,
    `    extra_body=${literal({ rapid }, "    ")},`,
    ")",
    "print(answer.choices[0].message.content)",
    `for each in answer.rapid["citations"]:`,
    `    print(each["document"], each["quote"])`,
    "",
  ].join("\n");
}

/** Returns a value of JSON as Python writes it; JSON's strings are Python's too. */
function literal(value, indent = "") {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((each) => `${inner}${literal(each, inner)},`)
    : Object.entries(value).map(([name, each]) => `${inner}${literal(name)}: ${literal(each, inner)},`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return items.length ? `${open}\n${items.join("\n")}\n${indent}${close}` : open + close;
}
