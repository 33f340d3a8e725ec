// The page: what its parts share, and what a person does with it.

import { Conversation } from "./conversation.js";
import { button, byId, legible, make } from "./dom.js";
import { DocumentList } from "./document_list.js";
import { Documents } from "./documents.js";
import { Operators } from "./operators.js";
import { Reader } from "./reader.js";
import { isWanted, loadSample, sampleFor } from "./sample.js";
import { Server } from "./server.js";
import { asCurl, asPython } from "./snippets.js";
import { Tabs } from "./tabs.js";

const LOOK_MS = 2000; // between two looks at a server whose models are loading
const IDLE = "Choose documents on the left, and ask about them. Answers name their sources.";
const TOY = "This model understands only generated documents, such as `rapid sample-document` makes.";

const server = new Server();
const documents = new Documents(server, (entry) => {
  list.update(entry);
  tellChosen();
  showHint();
});
const reader = new Reader(documents, changeView);
const list = new DocumentList(documents, {
  show: (entry) => reader.open(entry),
  forget: (entry) => reader.forget(entry),
  say,
});
const conversation = new Conversation(server, documents, {
  openSource,
  showCode,
  askForKey,
  settings,
  showFirst,
  changed: showBusy,
});
const operators = new Operators(server, () => showKeyForm(true));
new Tabs(byId("tabs"), (shown) => {
  document.body.dataset.tab = shown;
  operators.show(shown === "operators");
});
let isReady = false;
let models = []; // as the server lists them

function say(text, kind = "") {
  byId("notice").className = kind;
  byId("notice").replaceChildren(...(text ? [make("p", {}, text)] : []));
}

function changeView(view) {
  document.body.dataset.view = view;
  for (const each of document.querySelectorAll(".parts button")) {
    if (each.dataset.view === view) each.setAttribute("aria-current", "true");
    else each.removeAttribute("aria-current");
  }
}

function settings() {
  const [model, mode, given] = ["model", "mode", "temperature"].map((id) => byId(id).value);
  return { model, mode, temperature: given === "" ? null : Number(given) };
}

function openSource(source) {
  const entry = documents.find(source.part);
  if (entry) reader.open(entry, source);
  else say(`${legible(source.part.document)} is not among the documents any more.`);
}

/** Shows the first source of an answer where the reader's place on the screen is still empty. */
function showFirst(source) {
  const entry = documents.find(source.part);
  const isSeen = byId("reader").checkVisibility();
  if (entry && isSeen && !reader.shown && !reader.wanted) reader.open(entry, source, { moves: false });
}

function showCode(body) {
  byId("code-curl").value = asCurl(server.base, body);
  byId("code-python").value = asPython(server.base, body);
  byId("code-note").textContent = server.key ? "Both take the key from RAPID_API_KEY." : "";
  byId("code").showModal();
  for (const id of ["code-curl", "code-python"]) byId(id).scrollTop = 0;
}

async function copy(event) {
  const field = byId(event.target.dataset.copies);
  field.select();
  try {
    await navigator.clipboard.writeText(field.value);
    byId("code-note").textContent = "Copied.";
  } catch {
    byId("code-note").textContent = "This browser lets no page copy here: the text is selected, copy it yourself.";
  }
}

function showKeyForm(shown) {
  byId("key-form").hidden = !shown;
  byId("key-button").setAttribute("aria-expanded", String(shown));
  if (shown) byId("key").focus();
}

function askForKey(failure) {
  say(server.key ? `This key is not taken: ${failure.message}` : failure.message, "trouble");
  showKeyForm(true);
}

function showBusy() {
  const { isAsking } = conversation;
  byId("stop").hidden = !isAsking;
  for (const id of ["ask-button", "compare"]) byId(id).disabled = isAsking || !isReady;
}

function tellChosen() {
  const { chosen, unready } = documents;
  const names = chosen.slice(0, 3).map((each) => legible(each.name)).join(", ");
  const rest = chosen.length > 3 ? ` and ${chosen.length - 3} more` : "";
  const late = unready.length ? ` ${unready.length} more will be there when they are read.` : "";
  byId("asked-about").textContent = (chosen.length ? `About ${names}${rest}.` : "Without a document.") + late;
}

const chosenModel = () => models.find((each) => each.id === byId("model").value);

/** Says what to do where nothing was asked yet, and offers a text that the chosen model understands. */
function showHint() {
  const sample = sampleFor(chosenModel());
  const nodes = [make("p", {}, IDLE)];
  if (chosenModel()?.rapid?.embedded) nodes.push(make("p", {}, TOY));
  if (isReady && isWanted(sample, documents)) {
    const offer = button("Try it with a sample", () => openSample(sample), { id: "sample", class: "main" });
    nodes.push(make("p", {}, sample.what), offer, make("p", {}, "Enter in the empty question does the same."));
  }
  const { hint } = conversation;
  const isSame = hint.textContent === nodes.map((each) => each.textContent).join("");
  if (!isSame) hint.replaceChildren(...nodes); // new nodes would lose the focus
}

async function openSample(sample) {
  try {
    await loadSample(sample, server, documents);
    byId("question").value = sample.question;
    byId("question").focus();
  } catch (failure) {
    say(failure.message, "trouble");
  }
}

function submit(action) {
  const question = byId("question").value.trim();
  if (!question || conversation.isAsking || !isReady) return;
  byId("question").value = "";
  action(question);
}

async function waitUntilReady() {
  for (;;) {
    const { ready, reason } = await server.ready();
    if (ready) return say("");
    say(`Not ready yet: ${reason ?? "the models are loading"}. This page goes on when it is.`, "loading");
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
  }
}

async function start() {
  isReady = false;
  showBusy();
  await waitUntilReady();
  try {
    models = (await server.call("GET", "v1/models")).data;
    byId("model").replaceChildren(...models.map((each) => make("option", { value: each.id }, each.id)));
    byId("models").hidden = models.length < 2;
    documents.forget();
    await documents.load();
    list.update();
    isReady = true;
    showBusy();
    showHint();
  } catch (failure) {
    if (failure.status === 401) askForKey(failure);
    else say(failure.message, "trouble");
  }
}

for (const each of document.querySelectorAll(".parts button")) each.onclick = () => changeView(each.dataset.view);
for (const each of document.querySelectorAll("[data-copies]")) each.onclick = copy;
byId("model").onchange = showHint;
byId("key-button").onclick = () => showKeyForm(byId("key-form").hidden);
byId("key-form").onsubmit = (event) => {
  event.preventDefault();
  server.key = byId("key").value.trim();
  showKeyForm(false);
  operators.forget();
  start();
};
byId("ask").onsubmit = (event) => {
  event.preventDefault();
  if (!byId("question").value.trim()) byId("sample")?.click();
  submit((question) => conversation.ask(question));
};
byId("compare").onclick = () => submit((question) => conversation.compare(question));
byId("stop").onclick = () => conversation.stop();
byId("new-conversation").onclick = () => conversation.clear();
byId("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  } else if (event.key === "Escape") conversation.stop();
};

tellChosen();
start();
