/* The rollouts of one step, which is the newest one until one chooses another. */

const CACHED_STEPS = 4;
const TRAINED = "";
const EVERY_STEP = { first: -Infinity, last: Infinity };

class LiveRollouts {
  constructor() {
    this.run = null;
    this.kind = TRAINED;
    this._untrained = {}; // when they were written, by kind
    this.steps = [];
    this.step = null; // the one that is shown, or is being loaded
    this.follows = true;
    this._cache = new Map(); // the newest last
    this._turn = 0;
    this._isSeen = false; // whether one has scrolled near
    const filters = new Filters(EVERY_STEP, () => this.view.refresh());
    this.view = new GroupView(filters, () => this.setFollows(false)); // whoever reads a group stays at its step
    this._prepare();
  }

  /** Args: special: ids of special tokens */
  async setRun(run, special) {
    if (run !== this.run) {
      Object.assign(this, { run, special, kind: TRAINED, _untrained: {} });
      this.steps = [];
      this.step = null;
      this.setFollows(true);
    }
    await this.load();
  }

  /** Ask for the steps of the run again. */
  async load() {
    const { run, kind } = this;
    if (run === null) return;
    const { steps } = await ask(`${pathOf(run)}/steps?kind=${encodeURIComponent(kind)}`);
    if (run !== this.run || kind !== this.kind) return;
    if ((steps.at(-1) ?? 0) < (this.steps.at(-1) ?? 0)) this._cache.clear(); // the run repeats steps
    this.steps = steps;
    await this._refresh();
  }

  /** Args:
   *   newest: the newest step of the run that has rollouts; null if there is none
   *   untrained: when rollouts that are not trained on were written, by kind
   */
  async hear(newest, untrained) {
    const isNew = untrained[this.kind] !== this._untrained[this.kind];
    this._untrained = untrained;
    this._showKinds();
    if (this.kind !== TRAINED) {
      if (!isNew) return;
      if (this.follows) this._wanted = null;
      this._cache.clear();
      return this.load();
    }
    const last = this.steps.at(-1) ?? null;
    if (newest === last || newest === null) return;
    if (last === null || newest !== last + 1) return this.load();
    this.steps.push(newest);
    return this._refresh();
  }

  _showKinds() {
    const kinds = Object.keys(this._untrained);
    const shown = [this.run, ...kinds].join();
    byId("rollouts-kinds").hidden = !kinds.length;
    if (shown === this._shownKinds) return;
    this._shownKinds = shown;
    const labels = Object.fromEntries([[TRAINED, "trained on"], ...kinds.map((kind) => [kind, kind])]);
    byId("rollouts-kinds").replaceChildren(...choices("kind", labels, this.kind, (kind) => this._setKind(kind)));
  }

  _setKind(kind) {
    Object.assign(this, { kind, steps: [], step: null, _wanted: null });
    this._cache.clear();
    this.setFollows(true);
    return this.load();
  }

  /** Show the nearest step that has rollouts, and stay there. */
  async pick(step) {
    if (!this.steps.length) return;
    this.setFollows(false);
    this._isSeen = true;
    this.step = nearestOf(this.steps, step);
    await this._refresh();
  }

  setFollows(follows) {
    this.follows = byId("follow").checked = follows;
    byId("found").ariaLive = follows ? "off" : "polite"; // every new step would be told
  }

  async _refresh() {
    if (this.follows || !this.steps.includes(this.step)) this.step = this.steps.at(-1) ?? null;
    byId("rollouts").hidden = this.step === null;
    byId("no-rollouts").hidden = this.step !== null;
    if (this.step === null) return;
    this._showStep();
    const wanted = `${this.run}/${this.kind}/${this.step}`;
    if (!this._isSeen || document.hidden || wanted === this._wanted) return;
    this._wanted = wanted;
    await this._load();
  }

  _showStep() {
    const at = this.steps.indexOf(this.step);
    Object.assign(byId("step"), { max: this.steps.length - 1, value: at });
    Object.assign(byId("step-number"), { min: this.steps[0], max: this.steps.at(-1), value: this.step });
    byId("step").setAttribute("aria-valuetext", `step ${this.step}`);
    byId("step-before").disabled = at === 0;
    byId("step-after").disabled = at === this.steps.length - 1;
    const newer = this.steps.length - 1 - at;
    byId("scope").textContent = `Search, filters and colours apply to step ${this.step}, the one that is loaded.`
      + (newer ? ` There ${newer === 1 ? "is" : "are"} ${counted(newer, "newer step")}.` : "");
  }

  async _load() {
    const [turn, step, wanted] = [++this._turn, this.step, this._wanted];
    byId("details").ariaBusy = "true";
    byId("found").textContent = `loading step ${step} …`;
    try {
      const run = await this._stepOf(wanted, step);
      if (turn !== this._turn) return;
      this.view.setRun(run);
      await this.view.refresh();
    } catch (error) {
      if (turn !== this._turn) return;
      this._wanted = null;
      byId("found").textContent = `step ${step} cannot be shown: ${error.message}`;
    } finally {
      if (turn === this._turn) byId("details").ariaBusy = "false";
    }
  }

  async _stepOf(wanted, step) {
    const found = this._cache.get(wanted) ?? await this._ask(`${pathOf(this.run)}/steps/${step}`);
    this._cache.delete(wanted);
    this._cache.set(wanted, found);
    if (this._cache.size > CACHED_STEPS) this._cache.delete(this._cache.keys().next().value);
    return found;
  }

  async _ask(path) {
    if (this.kind !== TRAINED) return asRun(await ask(`${path}?kind=${encodeURIComponent(this.kind)}`), this.special);
    const origin = async (group, index) => (await ask(`${path}/origin?group=${group}&index=${index}`)).lines;
    return Object.assign(asRun(await ask(path), this.special), { origin });
  }

  _pickAt(at) {
    return this.pick(this.steps[Math.max(0, Math.min(this.steps.length - 1, at))]);
  }

  move(by) {
    return this._pickAt(this.steps.indexOf(this.step) + by);
  }

  follow(follows) {
    this.setFollows(follows);
    return this._refresh();
  }

  /** Load what is shown as soon as one scrolls near. */
  startLooking() {
    this._observer.observe(byId("rollouts-section"));
  }

  _prepare() {
    listenToTokens();
    byId("step-before").addEventListener("click", () => this.move(-1));
    byId("step-after").addEventListener("click", () => this.move(1));
    byId("step").addEventListener("input", () => {
      byId("step-number").value = this.steps[Number(byId("step").value)];
    });
    byId("step").addEventListener("input", delayed(() => this._pickAt(Number(byId("step").value))));
    byId("step-number").addEventListener("change", () => this.pick(Number(byId("step-number").value)));
    byId("follow").addEventListener("change", () => this.follow(byId("follow").checked));
    this._observer = new IntersectionObserver((entries) => {
      this._isSeen = entries.at(-1).isIntersecting;
      if (this._isSeen) this._refresh();
    }, { rootMargin: "400px" });
    document.addEventListener("visibilitychange", () => this._refresh());
  }
}

/** One step as the content of a run. */
function asRun({ step, groups, details, texts, has_server, has_trainer }, special) {
  const content = { steps: [{ step, groups }], texts, special, has_server, has_trainer };
  return new Run(content, async () => ({ groups: details }));
}
