/* Tokens: their colours, the legend, and the numbers of the token that one points at. */

const LARGEST_SURPRISE = 5; // nats: 0.7 %
const LARGEST_RATIO = 1.5;
const LEVELS = 8;
const FIRST_TOKENS = 600;
const MORE_TOKENS = 5000;

/* Characters that show nothing, or that change the order of others. */
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/u;

/* `value` is between -1 (orange) and 1 (blue), or null. */
const COLOURINGS = {
  trainer: {
    label: "Trainer", more: " logprob",
    value: ({ trainer }) => surprise(trainer),
    known: (run) => run.hasTrainer,
    legend: surpriseLegend,
  },
  server: {
    label: "Server", more: " logprob",
    value: ({ server }) => surprise(server),
    known: (run) => run.hasServer,
    legend: surpriseLegend,
  },
  ratio: {
    label: "Ratio", more: "",
    value: ({ ratio }) => (ratio ? Math.log(ratio) / Math.log(LARGEST_RATIO) : null),
    known: (run) => run.hasTrainer && run.hasServer,
    legend: () => ["low high", shown(1 / LARGEST_RATIO, 2), "1", shown(LARGEST_RATIO, 2),
      "probability by the trainer ÷ by the server"],
  },
  advantage: {
    label: "Advantage", more: "",
    value: (token, sequence, run) =>
      sequence.advantage === null ? null : sequence.advantage / run.largestAdvantage,
    known: (run) => run.largestAdvantage > 0,
    legend: (run) => ["low high", signed(-run.largestAdvantage), "0", signed(run.largestAdvantage),
      "advantage of the completion"],
  },
  mask: {
    label: "Mask", more: "",
    value: () => 0.6,
    known: () => true,
    legend: () => null,
  },
};

const surprise = (logprob) => (logprob === null ? null : logprob / LARGEST_SURPRISE);

function surpriseLegend() {
  return ["low", shown(-LARGEST_SURPRISE), "", "0", "nats; orange: unlikely"];
}

function heat(token, sequence, run, colouring) {
  if (!token.trained) return "still";
  const value = COLOURINGS[colouring].value(token, sequence, run);
  const level = value === null ? 0 : Math.min(LEVELS, Math.round(Math.abs(value) * LEVELS));
  return level ? `${value < 0 ? "low" : "high"} l${level}` : "";
}

/** A block with the first tokens, and a button for more. Colours change with `colour()`. */
class TokenBlock {
  constructor(run, part, sequence, wanted) {
    this.run = run;
    this.sequence = sequence;
    this.tokens = run.tokens(part);
    this.shown = 0;
    this.hits = hitsIn(this.tokens, wanted);
    this.element = make("div", { className: "tokens" });
    this.element.dir = "auto";
    blocks.set(this.element, this);
  }

  show(colouring, count = FIRST_TOKENS) {
    this.colouring = colouring;
    this.element.querySelector("button")?.remove();
    const end = Math.min(this.tokens.length, this.shown + count);
    for (; this.shown < end; this.shown += 1) this.element.append(this._span(this.shown));
    const left = this.tokens.length - end;
    if (left) {
      const text = `Show ${Math.min(left, MORE_TOKENS)} more of ${this.tokens.length} tokens`;
      const onclick = () => this.show(this.colouring, MORE_TOKENS);
      this.element.append(make("button", { type: "button", textContent: text, onclick }));
    }
    return this.element;
  }

  colour(colouring) {
    this.colouring = colouring;
    for (const span of this.element.querySelectorAll(".token")) {
      span.className = this._class(Number(span.dataset.at));
    }
  }

  _span(at) {
    const span = make("span", { className: this._class(at) });
    span.dataset.at = at;
    span.append(...visible(this.tokens[at].text));
    return span;
  }

  _class(at) {
    const token = this.tokens[at];
    const names = ["token", heat(token, this.sequence, this.run, this.colouring)];
    if (token.special) names.push("special");
    if (this.hits.has(at)) names.push("hit");
    return names.filter(Boolean).join(" ");
  }
}

const blocks = new WeakMap(); // block of an element

/** Positions of the tokens that contain a part of the searched text. */
function hitsIn(tokens, wanted) {
  const hits = new Set();
  if (!wanted) return hits;
  const text = tokens.map((token) => token.text).join("").toLowerCase();
  let [at, end] = [0, 0];
  for (let found = text.indexOf(wanted); found >= 0; found = text.indexOf(wanted, found + 1)) {
    while (at < tokens.length && end + tokens[at].text.length <= found) end += tokens[at++].text.length;
    for (let i = at, start = end; i < tokens.length && start < found + wanted.length; i += 1) {
      hits.add(i);
      start += tokens[i].text.length;
    }
  }
  return hits;
}

/** Nodes that show a text with its line ends, tabs and hidden characters. */
function visible(text) {
  if (text === "") return [make("i", { className: "mark part" })];
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  for (const character of text) {
    if (character === "\n" || character === "\t") {
      flush();
      nodes.push(make("i", { className: character === "\n" ? "mark end" : "mark tab" }));
      plain = character;
    } else if (HIDDEN.test(character)) {
      flush();
      const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      nodes.push(make("i", { className: "mark", textContent: `U+${code}` }));
    } else plain += character;
  }
  flush();
  return nodes;
}

function showLegend(run, colouring) {
  const scale = COLOURINGS[colouring].legend(run);
  const keys = [key("still", "abc", "not trained on"), key("special", "end", "special token")];
  if (!scale) {
    byId("legend").replaceChildren(key("high l5", "abc", "trained on"), ...keys);
    return;
  }
  const [className, low, middle, high, meaning] = scale;
  const ends = [low, middle, high].map((text) => make("span", { textContent: text }));
  byId("legend").replaceChildren(
    make("span", { className: "scale" },
      make("span", { className: `gradient ${className}` }),
      make("span", { className: "ends" }, ...ends)),
    make("span", { textContent: meaning }),
    ...keys,
  );
}

function key(className, sample, meaning) {
  return make("span", {}, make("span", { className: `token ${className}`, textContent: sample }), ` ${meaning}`);
}

/* The tip */

function tipOf(block, at) {
  const token = block.tokens[at];
  const row = (name, value) => [make("dt", { textContent: name }), make("dd", { textContent: value })];
  const logprob = (value) =>
    value === null ? "not known" : `${value.toFixed(4).replace("-", MINUS)} (${percent(Math.exp(value))})`;
  const rows = [row("text", JSON.stringify(token.text)), row("id", String(token.id))];
  if (token.trained) {
    rows.push(row("trainer", logprob(token.trainer)), row("server", logprob(token.server)));
    if (token.teacher !== null) rows.push(row("teacher", logprob(token.teacher)));
    rows.push(row("ratio", token.ratio ? shown(token.ratio, 5) : "not known"));
    rows.push(row("advantage", signed(block.sequence.advantage)));
  } else rows.push(row("", "not trained on"));
  return make("dl", {}, ...rows.flat());
}

const percent = (share) => `${shown(100 * share)} %`;

function showTip(span) {
  const tip = byId("tip");
  tip.replaceChildren(tipOf(blocks.get(span.parentElement), Number(span.dataset.at)));
  tip.hidden = false;
  document.querySelector(".token.chosen")?.classList.remove("chosen");
  span.classList.add("chosen");
  tipShownAt = topOf(span);
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const right = document.documentElement.clientWidth - width - 8;
  const below = box.bottom + 8;
  const fits = below + height < window.innerHeight;
  tip.style.left = `${Math.max(8, Math.min(box.left, right))}px`;
  tip.style.top = `${fits ? below : Math.max(8, box.top - height - 8)}px`;
}

let tipShownAt = 0; // where the token was: a tip does not stay when the page is scrolled
const topOf = (element) => element.getBoundingClientRect().top;

function hideTip() {
  byId("tip").hidden = true;
  document.querySelector(".token.chosen")?.classList.remove("chosen");
}

function listenToTokens() {
  const tokenAt = (event) => event.target.closest?.("#details .token");
  document.addEventListener("pointerover", (event) => {
    const span = tokenAt(event);
    if (span) showTip(span);
    else if (event.pointerType === "mouse") hideTip();
  });
  document.addEventListener("click", (event) => {
    const span = tokenAt(event);
    if (span) showTip(span);
    else hideTip();
  });
  document.addEventListener("scroll", () => {
    const chosen = document.querySelector(".token.chosen");
    if (chosen && Math.abs(topOf(chosen) - tipShownAt) > 2) hideTip();
  }, { passive: true });
}
