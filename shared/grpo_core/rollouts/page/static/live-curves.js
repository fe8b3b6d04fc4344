/* Curves that grow, of one run or of several over each other. */

const AXES = {
  step: { label: "Step", meaning: "the training step", ...STEPS, at: ([step]) => step },
  time: { label: "Time", meaning: "the time since the start of the run", text: duration, said: duration, at: ([, time]) => time },
  tokens: { label: "Tokens", meaning: "the number of sampled tokens", text: short, said: (x) => `${short(x)} tokens`, at: ([, , tokens]) => tokens },
};
const FIRST_CURVES = 12;
const WIDEST = 500; // of a chart, in pixels of CSS
const LARGEST_POINTS = 1000;
const DRAW_MS = 8;
const EVERYTHING = Symbol("everything");
const EVENTS_KEPT = 300; // after so many, the curves are asked for again

class LiveCurves {
  /** Args: onChoose: called with a run and the step that one clicks at */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.axis = "step";
    this._runs = [];
    this._names = {};
    this._curves = new Map(); // of a run: its curves by name
    this._charts = new Map(); // by name of the curve
    this._limit = FIRST_CURVES;
    this._turn = 0;
    this._waiting = new Set(); // names of the curves to draw
    this._prepare();
  }

  /** Args: names: shown names of the runs by their id */
  setRuns(runs, names) {
    this._runs = runs;
    this._names = names;
    this._showLines();
    this.draw();
  }

  async load(axis = this.axis) {
    const [turn, runs] = [++this._turn, this._runs];
    this._added = [];
    const width = Math.min(WIDEST, byId("curves").clientWidth) * devicePixelRatio;
    const query = `x=${axis}&points=${Math.min(LARGEST_POINTS, Math.round(width))}`;
    const answers = await Promise.all(runs.map((run) => ask(`${pathOf(run)}/curves?${query}`)));
    if (turn !== this._turn) return;
    this.axis = axis;
    this._curves = new Map(answers.map(({ curves }, at) => [runs[at], new Map(curves.map((one) => [one.name, known(one)]))]));
    for (const points of this._added) this._append(points);
    this.draw();
  }

  /** Add new points. Points of a step that the run repeats replace it and the later ones. */
  add(points) {
    this._added.push(points); // for the case that an answer is on its way, which may not contain them
    if (this._added.length > EVENTS_KEPT || !this._append(points)) return this.load();
    this.draw();
    return null;
  }

  /** Returns false if there is a new curve. */
  _append({ run, points }) {
    const curves = this._curves.get(run) ?? new Map();
    const names = Object.keys(points).filter((name) => curves.has(name));
    for (const name of names) {
      for (const point of points[name]) append(curves.get(name).points, [AXES[this.axis].at(point), point[3], point[0]]);
    }
    return names.length === Object.keys(points).length;
  }

  /** In the next frames of the screen; a hidden page draws nothing. */
  draw() {
    if (!this._waiting.size) requestAnimationFrame(() => this._draw());
    this._waiting.add(EVERYTHING);
  }

  /** Draw for a part of a frame, then go on in the next one, so that the page stays fluid. */
  _draw() {
    const end = performance.now() + DRAW_MS;
    if (this._waiting.delete(EVERYTHING)) this._arrange();
    for (const name of this._waiting) {
      if (performance.now() > end) break;
      this._waiting.delete(name);
      this._charts.get(name).show(this._all.get(name).series, this._range);
    }
    if (this._waiting.size) requestAnimationFrame(() => this._draw());
  }

  _arrange() {
    const all = this._named();
    const [first, last] = rangeOf([...all.values()].flatMap(({ series }) =>
      series.flatMap(({ points }) => [points[0][0], points.at(-1)[0]])));
    this._all = all;
    this._range = { ...AXES[this.axis], first, last };
    const names = [...all.keys()].slice(0, this._limit);
    for (const name of this._waiting) if (!all.has(name)) this._waiting.delete(name);
    for (const name of names) this._waiting.add(name);
    this._place(names.map((name) => this._chart(all.get(name))));
    this._tell(all);
  }

  /** What is drawn of each name, in the order in which the service names them. */
  _named() {
    const all = new Map();
    for (const [at, run] of this._runs.entries()) {
      for (const curve of this._curves.get(run)?.values() ?? []) {
        if (!curve.points.length) continue;
        if (!all.has(curve.name)) all.set(curve.name, { ...curve, series: [] });
        const several = this._runs.length > 1;
        all.get(curve.name).series.push({
          run, points: curve.points, interval: curve.intervals ?? [],
          label: several ? this._names[run] : null, style: several ? at : null,
        });
      }
    }
    return all;
  }

  _chart(curve) {
    let chart = this._charts.get(curve.name);
    if (!chart) {
      chart = new Chart(curve);
      this._charts.set(curve.name, chart);
      const drawn = () => this._shown.filter(({ series }) => series.length);
      connect(chart, drawn, ({ at, step }) => this.onChoose(chart.series[at].run, step));
    }
    return chart;
  }

  _place(charts) {
    this._shown = charts;
    const figures = charts.map(({ figure }) => figure);
    const { children } = byId("curves");
    const isSame = figures.length === children.length && figures.every((figure, at) => children[at] === figure);
    if (!isSame) byId("curves").replaceChildren(...figures);
  }

  _tell(all) {
    const longest = [...all.values()].some(({ series }) => series.some(({ points }) => points.length >= SMOOTH_FROM));
    const thin = this._runs.length > 1 ? "" : " Thin lines: the values.";
    byId("curves-hint").textContent = all.size
      ? `The x axis is ${AXES[this.axis].meaning}. Choose a point to see the rollouts of its step.`
        + (longest ? `${thin} Thick lines: mean over a tenth of the points.` : "")
      : (this._curves.size ? "No steps yet." : "");
    byId("more-curves").hidden = all.size <= this._limit;
    byId("more-curves").textContent = `Show ${counted(all.size - this._limit, "more curve")}`;
    byId("values").hidden = !all.size;
    if (byId("values").open) this._showValues();
  }

  _showLines() {
    byId("lines").hidden = this._runs.length < 2;
    byId("lines").replaceChildren(...this._runs.map((run, at) =>
      make("span", { className: "one" }, lineSample(at), ` ${this._names[run]}`)));
  }

  /** The text alternative of the curves. */
  _showValues() {
    const rows = [...this._all.values()].flatMap(({ title, series }) => series.map(({ label, points }) => {
      const values = [points[0][1], points.at(-1)[1], ...rangeOf(points.map(([, y]) => y))];
      return textRow([title, ...(this._runs.length > 1 ? [label] : []), ...values.map((value) => shown(value))]);
    }));
    const head = ["Curve", ...(this._runs.length > 1 ? ["Run"] : []), "First", "Newest", "Lowest", "Highest"];
    byId("values").lastElementChild.replaceChildren(table("Values of the curves", head, rows));
  }

  _prepare() {
    const labels = Object.fromEntries(Object.entries(AXES).map(([axis, { label }]) => [axis, label]));
    byId("axes").replaceChildren(...choices("axis", labels, this.axis, (axis) => this.load(axis)));
    byId("more-curves").addEventListener("click", () => {
      this._limit = Infinity;
      this.draw();
    });
    byId("values").addEventListener("toggle", () => byId("values").open && this._showValues());
  }
}

/** Without the points that have no value. */
const known = (curve) => ({ ...curve, points: curve.points.filter(([, y]) => y !== null) });

function append(points, point) {
  const [, value, step] = point;
  while (points.length && points.at(-1)[2] >= step) points.pop();
  if (value !== null) points.push(point);
}
