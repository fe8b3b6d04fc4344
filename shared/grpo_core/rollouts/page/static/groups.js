/* The list of groups, and the group that is shown: its prompt and its completions. */

const LISTED_AT_ONCE = 100;
const TEXT_AT_ONCE = 20000; // characters
const DOTS = 24;
const TOKENS_AT_ONCE = 1000;

class GroupView {
  /** Args: onRead: called when one turns to a group, or touches what is shown of it */
  constructor(filters, onRead = () => {}) {
    this.filters = filters;
    this.onRead = onRead;
    this.run = null;
    this.found = [];
    this.at = 0;
    this.listed = 0;
    this.colouring = null;
    this._blocks = [];
    this._turn = 0; // counts requests, so that a slow one does not replace a newer one
    this._prepare();
  }

  setRun(run) {
    this.run = run;
    this.filters.setRun(run);
    const known = Object.keys(COLOURINGS).filter((name) => COLOURINGS[name].known(run));
    if (!known.includes(this.colouring)) [this.colouring] = known;
    this._showColourings();
  }

  /** Apply the filters, and show the first group that matches. */
  async refresh() {
    const turn = ++this._turn;
    byId("found").textContent = "searching …";
    const found = await this.filters.select(() => turn === this._turn);
    if (turn !== this._turn) return;
    this.found = found;
    const sequences = found.reduce((sum, group) => sum + group.matching.length, 0);
    byId("found").textContent = `${counted(found.length, "group")}, ${counted(sequences, "completion")}`;
    byId("list").replaceChildren();
    this.listed = 0;
    this._listMore();
    await this.show(0);
  }

  async show(at) {
    const turn = ++this._turn;
    this.at = Math.max(0, Math.min(at, this.found.length - 1));
    hideTip();
    const group = this.found[this.at];
    byId("previous").disabled = this.at === 0;
    byId("next").disabled = this.at >= this.found.length - 1;
    if (!group) {
      byId("place").textContent = byId("count").textContent = "";
      byId("details").replaceChildren(make("p", { className: "empty", textContent: "No completion matches the filters." }));
      return;
    }
    while (this.listed <= this.at) this._listMore();
    this._mark();
    const details = await this.run.details(group);
    if (turn !== this._turn) return;
    byId("place").textContent = `Step ${group.step}, group ${group.group}`;
    byId("count").textContent = `${this.at + 1} of ${this.found.length}`;
    this._blocks = [];
    byId("details").replaceChildren();
    await this._fill(this._details(group, details), () => turn === this._turn);
  }

  /** Draw the parts of a group. After many tokens, the browser may react to the user first. */
  async _fill(parts, isCurrent) {
    let pauseAt = TOKENS_AT_ONCE;
    for (const part of parts) {
      byId("details").append(part());
      if (this._blocks.reduce((sum, block) => sum + block.shown, 0) < pauseAt) continue;
      pauseAt += TOKENS_AT_ONCE;
      await new Promise((done) => setTimeout(done));
      if (!isCurrent()) return;
    }
  }

  _turnTo(at) {
    this.onRead();
    this.show(at);
  }

  colour(name) {
    this.colouring = name;
    showLegend(this.run, name);
    for (const block of this._blocks) block.colour(name);
  }

  /** Functions that make the elements, in their order. */
  _details(group, details) {
    const hidden = [...details.sequences.keys()].filter((place) => !group.matching.includes(place));
    const card = (place) => this._completion(details.sequences[place], group);
    const others = hidden.length && make("details", {},
      make("summary", { textContent: `${counted(hidden.length, "other completion")} of this group` }));
    if (others) others.addEventListener("toggle", () => others.append(...hidden.map(card)), { once: true });
    const about = [group.task, details.item && `item ${details.item.slice(0, 12)}`].filter(Boolean).join(", ");
    return [
      () => make("section", { className: "prompt" },
        make("h3", {}, "Prompt ", make("small", { textContent: about })),
        ...this._content(details.prompt, details.prompt)),
      ...group.matching.map((place) => () => card(place)),
      ...(others ? [() => others] : []),
    ];
  }

  _completion(sequence, group) {
    const heading = make("h3", {}, `Completion ${sequence.index} `,
      make("span", { className: `score ${scoreHeat(sequence.score, this.run)}`, textContent: `reward ${shown(sequence.score)}` }));
    return make("section", { className: "completion" },
      make("div", { className: "about" }, heading, make("ul", {}, ...aboutOf(sequence))),
      sequence.reason ? make("p", { className: "reason", dir: "auto" }, ...visible(sequence.reason)) : null,
      ...this._content(sequence, sequence),
      this.run.origin ? originOf(() => this.run.origin(group.group, sequence.index)) : null);
  }

  _content(part, sequence) {
    const shownParts = [];
    if (part.text !== undefined) shownParts.push(plainText(part.text));
    if (part.tokens.length) {
      const block = new TokenBlock(this.run, part, sequence, this.filters.wanted);
      this._blocks.push(block);
      shownParts.push(block.show(this.colouring));
    } else if (!part.text) shownParts.push(make("p", { className: "empty", textContent: "no tokens" }));
    return shownParts;
  }

  _listMore() {
    const more = this.found.slice(this.listed, this.listed + LISTED_AT_ONCE);
    const items = more.map((group, offset) => listItem(group, this.run, this.listed + offset));
    byId("list").append(...items);
    this.listed += Math.max(more.length, 1);
    byId("more").hidden = this.listed >= this.found.length;
  }

  _mark() {
    byId("list").querySelector("[aria-current]")?.removeAttribute("aria-current");
    const item = byId("list").children[this.at].firstChild;
    item.setAttribute("aria-current", "true");
    const list = byId("list");
    const [top, bottom] = [item.offsetTop, item.offsetTop + item.offsetHeight];
    if (top < list.scrollTop) list.scrollTop = top;
    else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
  }

  _prepare() {
    byId("previous").addEventListener("click", () => this._turnTo(this.at - 1));
    byId("next").addEventListener("click", () => this._turnTo(this.at + 1));
    byId("more").addEventListener("click", () => this._listMore());
    byId("list").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) this._turnTo(Number(button.dataset.at));
    });
    byId("details").addEventListener("click", this.onRead);
    document.addEventListener("keydown", (event) => this._key(event));
  }

  _showColourings() {
    byId("colourings").replaceChildren(...Object.entries(COLOURINGS).map(([name, one]) => {
      const input = make("input", {
        type: "radio", name: "colouring", value: name,
        checked: name === this.colouring, disabled: !one.known(this.run),
        onchange: () => this.colour(name),
      });
      return make("label", {}, input, make("span", {}, one.label, make("span", { className: "wide", textContent: one.more })));
    }));
    showLegend(this.run, this.colouring);
    byId("colourings").hidden = byId("legend").hidden = this.colouring === "mask"; // nothing else is known
  }

  _key(event) {
    if (event.key === "Escape") hideTip();
    const typing = event.target.closest?.("input, select, textarea, dialog");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) this._turnTo(this.at + move);
    else if (event.key === "/") byId("search").focus();
    else return;
    event.preventDefault();
  }
}

/** Which weights sampled a completion, asked for when it is opened. Args: origin: gives lines */
function originOf(origin) {
  const lines = make("ol", { className: "origin" });
  const told = (texts) => lines.replaceChildren(...texts.map((textContent) => make("li", { textContent })));
  const details = make("details", {}, make("summary", { textContent: "Origin" }), lines);
  details.addEventListener("toggle", async () => told(await origin().catch((error) => [error.message])), { once: true });
  return details;
}

function aboutOf(sequence) {
  const facts = [
    sequence.part && `part ${sequence.part[0]} of ${sequence.part[1]} of its rollout`,
    sequence.advantage !== null && `advantage ${signed(sequence.advantage)}`,
    partsText(sequence.parts),
    counted(sequence.length, "token"),
    sequence.finish_reason === "length" ? "cut at the token limit" : sequence.finish_reason,
    sequence.versions && versionText(sequence.versions),
    sequence.staleness !== null && `staleness ${sequence.staleness}`,
    sequence.temperature !== 1 && `temperature ${shown(sequence.temperature)}`,
  ];
  return facts.filter(Boolean).map((textContent) => make("li", { textContent }));
}

function partsText(parts) {
  const texts = Object.entries(parts).map(([name, value]) => `${name} ${shown(value)}`);
  return texts.length && `parts: ${texts.join(", ")}`;
}

function versionText(versions) {
  const [first, last] = versions.map(([epoch, step]) => `${epoch}.${step}`);
  return first === last ? `version ${first}` : `versions ${first} to ${last}`;
}

/** From orange, the lowest reward of the run, to blue, the highest. */
function scoreHeat(score, run) {
  const [low, high] = run.rewardRange;
  if (score === null || low === high) return "";
  const share = (2 * (score - low)) / (high - low) - 1;
  const level = Math.round(Math.abs(share) * LEVELS);
  return level ? `${share < 0 ? "low" : "high"} l${level}` : "";
}

function listItem(group, run, at) {
  const dots = group.sequences.slice(0, DOTS).map(([score]) => make("i", { className: `dot ${scoreHeat(score, run)}` }));
  const button = make("button", { type: "button" },
    make("span", { className: "where", textContent: `step ${group.step} · group ${group.group}` }),
    make("span", { className: "mean", textContent: shown(meanScore(group)), title: "mean reward" }),
    make("span", { className: "snippet", dir: "auto", textContent: group.snippet || "(no text)" }),
    make("span", { className: "dots", ariaHidden: "true" }, ...dots));
  button.dataset.at = at;
  return make("li", {}, button);
}

function plainText(text) {
  const block = make("div", { className: "text", dir: "auto" });
  let end = 0;
  const more = () => {
    block.querySelector("button")?.remove();
    block.append(...visible(text.slice(end, end + TEXT_AT_ONCE)));
    end += TEXT_AT_ONCE;
    if (end < text.length) {
      block.append(make("button", { type: "button", textContent: `Show more of ${text.length} characters`, onclick: more }));
    }
  };
  if (text) more();
  else block.append(make("span", { className: "empty", textContent: "no text" }));
  return block;
}
