/* What a run does now: a panel for each chosen run. */

const FIRST_WARNINGS = 5;
const SECONDS = /_in_s$/;
const PARTS = { wait: "wait for data", train: "train", publish: "publish", save: "save" };
const LEVELS_OF_WARNINGS = { error: "✖", warning: "⚠" };

class RunPanel {
  constructor(name) {
    this.name = name;
    this.state = null;
    this._all = false; // whether all warnings are shown
    const part = (title, ...children) => make("div", {}, make("h4", { textContent: title }), ...children);
    this.heading = make("h3", { textContent: name, dir: "auto" });
    this.word = make("p", { className: "word" });
    this.bar = make("progress", { ariaLabel: `Progress of ${name}` });
    this.rest = make("span", { className: "rest" });
    this.facts = make("dl", { className: "facts" });
    this.alerts = make("ul", { className: "alerts", ariaLabel: "Alerts", hidden: true });
    this.services = make("div", { className: "wide-table" });
    this.times = make("div");
    this.data = make("dl", { className: "numbers-of-run" });
    this.warnings = make("div");
    this.summary = make("summary");
    this.more = make("details", {}, this.summary, this.facts,
      make("div", { className: "columns" },
        part("Services", this.services), part("Time of a step", this.times), part("Data", this.data)),
      part("Warnings", this.warnings));
    this.element = make("article", { className: "panel", ariaLabel: name },
      make("div", { className: "headline" }, this.heading, this.word),
      this.bar, this.rest, this.alerts, this.more);
  }

  setFacts(facts) {
    this.facts.replaceChildren(...factRows(facts));
  }

  show(state) {
    const before = this.state;
    this.state = state;
    this.word.textContent = `${sentence(state.state)}, ${stepText(state)}`;
    Object.assign(this.bar, state.steps ? { max: state.steps, value: state.step ?? 0 } : { max: 1, value: 0 });
    this.rest.textContent = state.eta_text ?? "";
    this._showAlerts(state.alerts ?? []);
    this._showServices(state.services ?? []);
    this._showTimes(state.times ?? {});
    this._showData(state);
    if (JSON.stringify(before?.warnings) !== JSON.stringify(state.warnings)) this._showWarnings();
    if (before) this._announce(before, state);
  }

  /** Durations grow, although no event arrives. */
  tick() {
    const now = Date.now() / 1000;
    for (const element of this.services.querySelectorAll("[data-since]")) {
      element.textContent = `for ${duration(Math.max(0, Math.round(now - Number(element.dataset.since))))}`;
    }
  }

  _announce(before, state) {
    const said = [];
    if (before.state !== state.state) said.push(state.state);
    const names = (one) => (one.alerts ?? []).map(({ name }) => name);
    said.push(...(state.alerts ?? []).filter(({ name }) => !names(before).includes(name)).map(({ text }) => `Alert: ${text}`));
    const error = (one) => (one.warnings ?? []).filter(({ level }) => level === "error").at(-1);
    if (error(state) && error(state).time !== error(before)?.time) said.push(`Error: ${error(state).text}`);
    if (said.length) announce(`${this.name}: ${said.join(". ")}`);
  }

  _showAlerts(alerts) {
    this.alerts.hidden = !alerts.length;
    this.alerts.replaceChildren(...alerts.map(({ text, advice, since }) => make("li", {},
      mark("✖"), make("strong", { textContent: "Alert: " }), text,
      make("small", { textContent: since ? ` since ${clock(since)}` : "" }),
      make("span", { className: "advice", textContent: advice ?? "" }))));
  }

  _showServices(services) {
    const rows = services.map(({ name, stage, since, detail, memory_bytes: memory }) => make("tr", {},
      make("th", { scope: "row", textContent: name }),
      make("td", {}, make("span", { className: "stage", textContent: stage ?? UNKNOWN }), " ",
        since ? timer(since) : null,
        detail ? make("small", { textContent: detail, dir: "auto" }) : null),
      make("td", { className: "number", textContent: memory ? bytes(memory) : "–" })));
    const content = table(`Services of ${this.name}`, ["Service", "Stage", "#Memory"], rows);
    const isOver = services.length && services.every(({ stage }) => stage === "ended");
    this.services.replaceChildren(isOver
      ? make("details", {}, make("summary", { textContent: `all ${services.length} have ended` }), content) : content);
    this.tick();
  }

  /** Two bars with the same scale, and their numbers. */
  _showTimes(times) {
    const parts = Object.keys(PARTS).filter((name) => times[name]);
    if (!parts.length) {
      this.times.replaceChildren(make("p", { className: "empty", textContent: "no step yet" }));
      return;
    }
    const sum = (which) => parts.reduce((all, name) => all + (times[name][which] ?? 0), 0);
    const longest = Math.max(sum("newest"), sum("median")) || 1;
    const bar = (which) => make("div", { className: "stack" }, ...parts.map((name) => {
      const piece = make("span", { className: `part-${name}` });
      piece.style.width = `${(100 * (times[name][which] ?? 0)) / longest}%`;
      return piece;
    }));
    const row = (heading, newest, median) => make("tr", {},
      make("th", { scope: "row" }, ...heading),
      make("td", { className: "number", textContent: newest }), make("td", { className: "number", textContent: median }));
    const cell = (value) => (value === null || value === undefined ? "–" : duration(value));
    this.times.replaceChildren(
      make("div", { className: "stacks", ariaHidden: "true" },
        make("small", { textContent: "newest" }), bar("newest"), make("small", { textContent: "median" }), bar("median")),
      table(`Time of a step of ${this.name}`, ["Part", "#Newest", "#Median"], [
        ...parts.map((name) => row([swatch(name), PARTS[name]], cell(times[name].newest), cell(times[name].median))),
        row(["together"], cell(sum("newest")), cell(sum("median"))),
      ]));
  }

  _showData({ queue, staleness, tokens_per_s: speed, training_speed: training }) {
    const told = (value, unit) => (value === null || value === undefined ? UNKNOWN : `${short(value)}${unit}`);
    const rows = [
      ["Tokens per second", told(speed, "")],
      ...(training ? [["Training speed", training]] : []),
      ["Staleness", told(staleness, " steps")],
      ...Object.entries(queue ?? {}).map(([name, value]) => [
        sentence(name.replace(SECONDS, "").replaceAll("_", " ")), SECONDS.test(name) ? duration(value) : told(value, ""),
      ]),
    ];
    if (!queue) rows.push(["Queue", UNKNOWN]);
    this.data.replaceChildren(...factRows(rows));
  }

  _showSummary(warnings) {
    const number = (wanted) => warnings.reduce((sum, { level, count }) => sum + (level === wanted ? count : 0), 0);
    const counts = [[number("error"), "error"], [number("warning"), "warning"]]
      .filter(([number]) => number).map(([number, word]) => counted(number, word));
    this.summary.textContent = ["Services, times, data", ...counts].join(", ");
  }

  _showWarnings() {
    const all = [...(this.state.warnings ?? [])].sort((left, right) => right.time - left.time);
    this._showSummary(all);
    const some = this._all ? all : all.slice(0, FIRST_WARNINGS);
    const items = some.map(({ time, service, level, event, text, count }) => make("li", { className: level },
      mark(LEVELS_OF_WARNINGS[level] ?? "•"),
      make("strong", { textContent: `${sentence(level)} ` }),
      make("small", { textContent: `${clock(time)} ${service}${event ? ` ${event}` : ""}${count > 1 ? `, ${count} times` : ""} ` }),
      make("span", { textContent: text, dir: "auto" })));
    const left = all.length - some.length;
    const onclick = () => {
      this._all = true;
      this._showWarnings();
    };
    this.warnings.replaceChildren(
      all.length ? make("ol", { className: "warnings" }, ...items) : make("p", { className: "empty", textContent: "none" }),
      ...(left ? [make("button", { type: "button", textContent: `Show ${left} more`, onclick })] : []));
  }
}

const mark = (textContent) => make("span", { className: "icon", textContent, ariaHidden: "true" });
const swatch = (name) => make("span", { className: `swatch part-${name}`, ariaHidden: "true" });

function timer(since) {
  const element = make("span", { className: "since", title: `since ${clock(since)}` });
  element.dataset.since = since;
  return element;
}
