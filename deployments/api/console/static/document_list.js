// The list of documents on the left: choosing, adding and deleting them.

import { byId, button, legible, make, plural, Progress } from "./dom.js";
import { listChosen, listDropped } from "./documents.js";

export class DocumentList {
  /** `show(entry)` opens a document, `forget(entry)` closes one that is deleted, `say(text)` tells. */
  constructor(documents, { show, forget, say }) {
    Object.assign(this, { documents, show, forget, say });
    this.rows = new Map();
    this.list = byId("document-list");
    byId("choose-files").onclick = () => byId("files").click();
    byId("choose-folder").onclick = () => byId("folder").click();
    byId("files").onchange = (event) => this.take(listChosen(event.target.files), event.target);
    byId("folder").onchange = (event) => this.take(listChosen(event.target.files), event.target);
    byId("choose-all").onclick = () => this.chooseAll();
    byId("more-documents").onclick = () => documents.load().catch((failure) => say(failure.message));
    this.takeDrops();
  }

  takeDrops() {
    const zone = byId("drop");
    addEventListener("dragover", (event) => {
      event.preventDefault();
      zone.classList.add("over");
    });
    addEventListener("dragleave", (event) => event.relatedTarget ?? zone.classList.remove("over"));
    addEventListener("drop", async (event) => {
      event.preventDefault();
      zone.classList.remove("over");
      this.take(await listDropped(event.dataTransfer));
    });
  }

  take(files, input = null) {
    for (const [file, name] of files) this.documents.add(file, name);
    if (input) input.value = ""; // so that the same file may be chosen again
  }

  /** Chooses all documents, or none where all are chosen. */
  chooseAll() {
    const ready = this.documents.all.filter((each) => each.state === "ready");
    const chosen = ready.some((each) => !each.chosen);
    for (const each of ready) each.chosen = chosen;
    this.documents.changed();
  }

  /** Shows one document anew, or all where none is named. */
  update(entry = null) {
    if (entry && this.rows.has(entry)) this.rows.get(entry).update();
    else this.updateAll();
    const { all, chosen, keeps, after } = this.documents;
    const none = keeps
      ? "No documents yet. Text, Markdown, HTML, PDF and DOCX can be read."
      : "This server keeps no files: texts stay in this page and are sent with each question.";
    const some = `${chosen.length} of ${plural(all.length, "document")} chosen`;
    byId("documents-note").textContent = all.length ? some : none;
    byId("more-documents").hidden = after === null;
    byId("choose-all").hidden = all.length < 2;
    const isAll = chosen.length > 0 && all.every((each) => each.chosen || each.state !== "ready");
    byId("choose-all").textContent = isAll ? "Choose none" : "Choose all";
  }

  updateAll() {
    const { all } = this.documents;
    for (const entry of this.rows.keys()) if (!all.includes(entry)) this.rows.delete(entry);
    for (const entry of all) {
      if (!this.rows.has(entry)) this.rows.set(entry, new Row(entry, this));
      this.rows.get(entry).update();
    }
    const nodes = all.map((entry) => this.rows.get(entry).node);
    const { children } = this.list;
    const isSame = nodes.length === children.length && nodes.every((node, i) => node === children[i]);
    if (!isSame) this.list.replaceChildren(...nodes); // moving nodes would lose the focus
  }

  async remove(entry) {
    const dialog = byId("removal");
    byId("removal-name").textContent = legible(entry.name);
    dialog.returnValue = "keep";
    dialog.showModal();
    await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
    if (dialog.returnValue !== "delete") return;
    try {
      await this.documents.remove(entry);
      this.forget(entry);
      this.say(`${legible(entry.name)} is deleted.`);
    } catch (failure) {
      this.say(`${legible(entry.name)} is not deleted: ${failure.message}`);
    }
  }
}

class Row {
  constructor(entry, list) {
    this.entry = entry;
    const name = legible(entry.name);
    this.box = make("input", {
      type: "checkbox",
      "aria-label": `Ask about ${name}`,
      onchange: () => {
        entry.chosen = this.box.checked;
        list.documents.changed(entry);
      },
    });
    this.name = button(name, () => list.show(entry), { class: "name" });
    this.removal = button("Delete", () => list.remove(entry), { "aria-label": `Delete ${name}` });
    this.detail = make("p", { class: "detail" });
    this.progress = null;
    this.node = make("li", {}, make("div", { class: "row" }, this.box, this.name, this.removal), this.detail);
  }

  update() {
    const { state, progress, detail, chosen } = this.entry;
    const isReady = state === "ready";
    this.node.dataset.state = state;
    this.box.checked = chosen;
    this.box.disabled = state === "failed";
    this.name.disabled = !isReady;
    this.removal.hidden = !isReady && state !== "failed";
    this.detail.textContent = state === "waiting" ? "Waiting" : state === "failed" ? `Not read: ${detail}` : detail;
    if (!progress) {
      this.progress?.node.remove();
      this.progress = null;
      return;
    }
    if (!this.progress) {
      this.progress = new Progress(progress.what);
      this.node.append(this.progress.node);
    }
    if (progress.of) this.progress.show(progress.what, progress.done, progress.of);
    else if (progress.what !== this.progress.what) this.progress.begin(progress.what);
  }
}
