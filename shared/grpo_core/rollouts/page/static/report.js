/* Builds the report: a page that contains all data of a run. */

async function unpack(id) {
  const packed = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot unpack the data; use a browser of 2023 or later");
  }
  const content = await unpack("content");
  byId("title").textContent = content.title;
  byId("facts").replaceChildren(...factRows(content.facts));
  const run = new Run(content, (at) => unpack(`step-${at}`));
  let steps = null;
  showCurves(content.curves, (step) => {
    steps?.showStep(step);
    byId("rollouts-section").scrollIntoView();
  });
  if (run.groups.length) steps = showRollouts(run);
}

function showRollouts(run) {
  let view = null;
  const refresh = () => view.refresh();
  const steps = new StepRange(run.content.steps.map((one) => one.step), refresh);
  view = new GroupView(new Filters(steps, refresh));
  view.setRun(run);
  tellWhatIsLeftOut(run.content);
  listenToTokens();
  byId("rollouts-section").hidden = false;
  view.refresh();
  return steps;
}

function tellWhatIsLeftOut({ steps, all_steps: allSteps }) {
  const said = [];
  if (steps.length < allSteps) {
    said.push(`To keep the page small, it shows the rollouts of ${steps.length} of ${allSteps} steps, evenly chosen, with the first and the last one. The curves show all steps.`);
  }
  const cut = steps.filter((one) => one.groups.length < one.all_groups).length;
  if (cut) said.push(`In ${counted(cut, "step")} it shows some of the groups, evenly chosen.`);
  byId("left-out").textContent = said.join(" ");
  byId("left-out").hidden = !said.length;
}

/** Args: onStep: called with the step that one clicks at */
function showCurves(curves, onStep) {
  const drawable = curves
    .map((curve) => ({ ...curve, points: curve.points.filter(([, y]) => y !== null).map(([x, y]) => [x, y, x]) }))
    .filter((curve) => curve.points.length);
  if (!drawable.length) return;
  const [first, last] = rangeOf(drawable.flatMap((curve) => curve.points.map(([x]) => x)));
  const charts = drawable.map((curve) => {
    const chart = new Chart(curve);
    chart.show([{ style: null, points: curve.points, interval: curve.interval }], { ...STEPS, first, last });
    connect(chart, () => charts, ({ x }) => onStep(x));
    return chart;
  });
  byId("curves").replaceChildren(...charts.map((chart) => chart.figure));
  const width = Math.max(...drawable.map((curve) => smoothingWindow(curve.points)));
  const smooth = drawable.some((curve) => curve.points.length >= SMOOTH_FROM);
  byId("curves-hint").textContent = "The x axis is the training step. Click a curve to see the rollouts of a step."
    + (smooth ? ` Thin lines: each step. Thick lines: mean of ${width} steps.` : "");
  byId("curves-section").hidden = false;
}

/** The steps that are shown: a slider for one of them, two fields for several. */
class StepRange {
  /** Args:
   *   steps: all steps of the page, in order
   *   onChange: called after every change
   */
  constructor(steps, onChange) {
    this.steps = steps;
    this.onChange = onChange;
    this._prepare();
  }

  get first() {
    return numberIn("from", -Infinity);
  }

  get last() {
    return numberIn("to", Infinity);
  }

  showStep(step) {
    const nearest = nearestOf(this.steps, step);
    this._set(nearest, nearest);
    this.onChange();
  }

  _set(from, to) {
    byId("from").value = from;
    byId("to").value = to;
    this._follow();
  }

  /** The slider stands at the first shown step. */
  _follow() {
    const from = numberIn("from", this.steps[0]);
    const at = this.steps.findIndex((step) => step >= from);
    byId("step").value = at < 0 ? this.steps.length - 1 : at;
  }

  _prepare() {
    const [first, last] = [this.steps[0], this.steps.at(-1)];
    byId("step").max = this.steps.length - 1;
    const later = delayed(this.onChange);
    for (const id of ["from", "to"]) {
      Object.assign(byId(id), { min: first, max: last });
      byId(id).addEventListener("input", () => {
        this._follow();
        later();
      });
    }
    this._set(last, last);
    byId("step").addEventListener("input", () => this.showStep(this.steps[Number(byId("step").value)]));
    byId("all-steps").addEventListener("click", () => {
      this._set(first, last);
      this.onChange();
    });
  }
}

start().catch((error) => {
  byId("failure").textContent = `The page cannot show the run: ${error.message}`;
  byId("failure").hidden = false;
  throw error;
});
