// Texts to try the page with, each with a question that its text answers.

const GENERATED = {
  file: "generated.txt",
  name: "Sample chronicle.txt",
  question: "List the three deposits of Lonadu.",
  what: "The sample is a generated chronicle of made-up names.",
};
const ENGLISH = {
  file: "english.txt",
  name: "Sample, objects in Python.txt",
  question: "Which scheme does CPython currently use to collect garbage?",
  what: "The sample is a page of Python's own documentation, about objects, values and types.",
};

const isSample = (name) => [GENERATED, ENGLISH].some((each) => each.name === name);

/** Returns the sample for a model, by its entry in the list of models; none without a model. */
export const sampleFor = (model) => model && (model.rapid?.embedded ? GENERATED : ENGLISH);

/** Whether a sample is worth offering: where there is nothing else to ask about. */
export function isWanted(sample, documents) {
  const names = documents.all.map((each) => each.name);
  return Boolean(sample) && names.every(isSample) && !names.includes(sample.name);
}

/** Adds a sample to the documents, as if its file had been dropped. */
export async function loadSample(sample, server, documents) {
  const response = await server.open("GET", `console/${sample.file}`);
  const text = await response.text();
  for (const each of documents.all) each.chosen = false;
  documents.add(new File([text], sample.name, { type: "text/plain" }));
}
