// The two tabs of the page: asking, and the state of the server. Arrow keys move between them.

import { byId } from "./dom.js";

/** Shows the panel of a chosen tab; `shown(id)` is told which panel that is. */
export class Tabs {
  constructor(list, shown) {
    this.tabs = [...list.querySelectorAll("[role=tab]")];
    this.shown = shown;
    for (const tab of this.tabs) tab.onclick = () => this.choose(tab);
    list.onkeydown = (event) => this.move(event);
  }

  choose(chosen) {
    for (const tab of this.tabs) {
      const isChosen = tab === chosen;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !isChosen;
    }
    this.shown(chosen.getAttribute("aria-controls"));
  }

  move(event) {
    const { length } = this.tabs;
    const at = this.tabs.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const tab = this.tabs[(to + length) % length];
    this.choose(tab);
    tab.focus();
  }
}
