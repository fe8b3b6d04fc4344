/* Builds the live page: chooses runs, and passes what the service tells to the parts of the page. */

const RUNS_EVERY_MS = 10000;
const TICK_MS = 1000;

class LivePage {
  constructor() {
    this.runs = [];
    this.chosen = new URLSearchParams(location.search).getAll("run");
    this.panels = new Map();
    this.lostAt = null;
    this.unheard = new Set(); // chosen runs whose state has not arrived since the events are connected
    this.line = new RunLine((ids) => this.choose(ids));
    this.curves = new LiveCurves((run, step) => this._showStep(run, step));
    this.rollouts = new LiveRollouts();
    this.events = new Events({
      state: (state) => this._hear(state),
      points: (points) => this.curves.add(points),
      evaluations: () => this.curves.load(),
      lost: () => this._lose(),
      connected: () => this._connected(),
    });
    this._prepare();
  }

  /** Ask for the runs again, and show the chosen ones. */
  async load() {
    this.runs = await ask("runs");
    this._find();
    const ids = this.runs.map(({ id }) => id);
    const chosen = ids.filter((id) => this.chosen.includes(id));
    this.line.show(this.runs, this.chosen);
    if (!this.panels.size && ids.length) await this.choose(chosen.length ? chosen : ids.slice(0, 1));
    else await Promise.all(this.chosen.map((id) => this._about(id)));
  }

  async choose(ids) {
    this.chosen = ids;
    byId("failure").hidden = true;
    history.replaceState(null, "", `?${queryOf(ids)}${location.hash}`);
    this.line.show(this.runs, this.chosen);
    this._showPanels();
    this.events.choose(ids);
    this.curves.setRuns(ids, this._names());
    await Promise.all([this._showSettings(), this._chooseRollouts(ids), ...ids.slice(1).map((id) => this._about(id))]);
  }

  _names() {
    return Object.fromEntries(this.runs.map(({ id, name }) => [id, name]));
  }

  /* The chosen runs */

  _showPanels() {
    const names = this._names();
    this.panels = new Map(this.chosen.map((id) => [id, this.panels.get(id) ?? new RunPanel(names[id])]));
    byId("panels").replaceChildren(...[...this.panels.values()].map(({ element }) => element));
    const isOnly = this.panels.size === 1;
    byId("panels").className = isOnly ? "" : "several";
    for (const { more } of this.panels.values()) more.open = isOnly;
  }

  async _showSettings() {
    const chosen = this.chosen;
    byId("differences").hidden = this._link("#differences").hidden = chosen.length < 2;
    if (chosen.length < 2) return;
    const { runs, rows } = await ask(`differences?${queryOf(chosen)}`);
    if (chosen !== this.chosen) return;
    byId("settings").replaceChildren(rows.length
      ? table("Settings that differ", ["Setting", ...runs], rows.map(({ setting, values }) => textRow([setting, ...values.map(valueText)])))
      : make("p", { className: "empty", textContent: "All settings are equal." }));
  }

  async _chooseRollouts(ids, run = ids[0]) {
    const names = this._names();
    byId("rollouts-run-field").hidden = ids.length < 2;
    byId("rollouts-run").replaceChildren(...ids.map((id) => make("option", { value: id, textContent: names[id], selected: id === run })));
    await this.rollouts.setRun(run, (await this._about(run)).special);
  }

  async _about(id) {
    const about = await ask(pathOf(id));
    this.panels.get(id)?.setFacts(about.facts);
    return about;
  }

  async _showStep(run, step) {
    if (run !== this.rollouts.run) await this._chooseRollouts(this.chosen, run);
    byId("rollouts-section").scrollIntoView();
    byId("rollouts-heading").focus({ preventScroll: true });
    await this.rollouts.pick(step);
  }

  /* What the service tells */

  _hear(state) {
    if (this.unheard.delete(state.run) && !this.unheard.size) this._catchUp();
    this.panels.get(state.run)?.show(state);
    if (state.run === this.rollouts.run) this.rollouts.hear(state.newest_rollouts, state.untrained);
    const run = this.runs.find(({ id }) => id === state.run);
    if (run && (run.state !== state.state || run.step !== state.step)) {
      Object.assign(run, { state: state.state, step: state.step, steps: state.steps });
      this.line.show(this.runs, this.chosen);
    }
    if (this.chosen.length === 1) document.title = `${stepText(state)} – ${run?.name ?? state.run}`;
  }

  /** From now on, the events tell what is new. What was before is asked for. */
  async _catchUp() {
    await Promise.all([this.curves.load(), this.rollouts.load()]);
    this.rollouts.startLooking(); // now the curves have their place, and the rollouts are below them
  }

  _lose() {
    if (this.lostAt !== null) return;
    this.lostAt = Date.now() / 1000;
    byId("connection").textContent =
      `grpo-watch does not answer since ${clock(this.lostAt)}. The page shows the state of then, and tries again.`;
    byId("connection").hidden = false;
  }

  _find() {
    this.lostAt = null;
    byId("connection").hidden = true;
  }

  /** A request failed. If the service is away, the events tell when it is back. */
  _fail(event) {
    event.preventDefault();
    if (event.reason instanceof ServiceAway) this._lose();
    else {
      byId("failure").textContent = `The page cannot show everything: ${event.reason.message}`;
      byId("failure").hidden = false;
    }
  }

  _connected() {
    this._find();
    this.unheard = new Set(this.chosen);
  }

  /* Keys */

  _link(target) {
    return byId("parts").querySelector(`[href="${target}"]`);
  }

  _key(event) {
    const typing = event.target.closest?.("input:not([type=checkbox], [type=radio], [type=range]), select, textarea, dialog");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const react = {
      "?": () => byId("keys").showModal(),
      p: () => this.rollouts.move(-1),
      n: () => this.rollouts.move(1),
      f: () => this.rollouts.follow(!this.rollouts.follows),
      s: () => this._link("#state").click(),
      c: () => this._link("#curves-section").click(),
      r: () => this._link("#rollouts-section").click(),
    }[event.key];
    if (!react) return;
    event.preventDefault();
    react();
  }

  _prepare() {
    window.addEventListener("unhandledrejection", (event) => this._fail(event));
    document.addEventListener("keydown", (event) => this._key(event));
    byId("show-keys").addEventListener("click", () => byId("keys").showModal());
    byId("rollouts-run").addEventListener("change", () => this._chooseRollouts(this.chosen, byId("rollouts-run").value));
    setInterval(() => document.hidden || this.panels.forEach((panel) => panel.tick()), TICK_MS);
    setInterval(() => document.hidden || this.load(), RUNS_EVERY_MS);
  }
}

const valueText = (value) => {
  if (value === null) return "not set";
  return typeof value === "string" ? value : JSON.stringify(value);
};

/** The line of runs: one chooses a run, or ticks several to compare them. */
class RunLine {
  /** Args: onChoose: called with the ids of the chosen runs, in the order of the line */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this._items = new Map(); // elements by the id of the run
  }

  show(runs, chosen) {
    this._chosen = chosen;
    const several = runs.length > 1;
    byId("runs-hint").textContent = runs.length
      ? (several ? "Choose a run, or tick several to compare them." : "")
      : "No run yet. The page shows the first one as soon as it starts.";
    if (runs.length !== this._items.size || runs.some(({ id }) => !this._items.has(id))) this._make(runs);
    for (const run of runs) this._update(this._items.get(run.id), run, several);
  }

  /** Elements stay while the runs are the same, so that no click is lost. */
  _make(runs) {
    this._items = new Map(runs.map((run) => [run.id, this._items.get(run.id) ?? this._item(run)]));
    byId("runs").replaceChildren(...[...this._items.values()].map(({ element }) => element));
  }

  _item({ id, name, title }) {
    const tick = make("input", { type: "checkbox", ariaLabel: `Compare ${name}` });
    tick.addEventListener("change", () => this.onChoose(this._ticked(id, tick)));
    const label = make("label", { className: "tick" }, tick);
    const state = make("small", { title });
    const button = make("button", { type: "button" },
      make("span", { className: "run-name", textContent: name, dir: "auto" }), state);
    button.addEventListener("click", () => this.onChoose([id]));
    return { element: make("li", {}, label, button), tick, label, button, state };
  }

  _update({ tick, label, button, state }, run, several) {
    label.hidden = !several;
    tick.checked = this._chosen.includes(run.id);
    button.ariaPressed = String(tick.checked);
    const text = `${run.state}, ${stepText(run)}`;
    if (state.textContent !== text) state.textContent = text;
  }

  /** At least one run stays chosen. */
  _ticked(id, tick) {
    const wanted = [...this._items.keys()].filter((one) => (one === id ? tick.checked : this._chosen.includes(one)));
    if (!wanted.length) tick.checked = true;
    return wanted.length ? wanted : this._chosen;
  }
}

new LivePage().load();
