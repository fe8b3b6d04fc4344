/* The line of runs: one chooses a run, or ticks several to compare them. */

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
