/* Curves: small SVG charts that share one crosshair. */

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 340;
const HEIGHT = 132;
const LEFT = 40;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const SMOOTH_FROM = 30; // points

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

class Chart {
  /** Args: first, last: steps at the ends of the x axis */
  constructor(curve, first, last) {
    this.points = curve.points.filter(([, y]) => y !== null);
    this.interval = new Map(curve.interval.map(([x, low, high]) => [x, [low, high]]));
    this.unit = curve.unit;
    this.first = first;
    this.last = Math.max(last, first + 1);
    const values = [...this.points.map(([, y]) => y), ...[...this.interval.values()].flat()];
    this.ticks = niceTicks(Math.min(...values), Math.max(...values));
    this.value = make("span", { className: "value" });
    this.figure = make("figure", {},
      make("figcaption", {},
        make("span", { className: "name", textContent: curve.title, title: curve.name }), this.value),
      this._svg(curve));
    this.rest();
  }

  rest() {
    this.cross.style.display = "none";
    const [, y] = this.points.at(-1);
    this.value.textContent = this._text(this.points.at(-1)[0], y, "");
  }

  /** Show the value at the nearest step. */
  at(step) {
    const nearest = this.points.reduce((best, point) =>
      Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
    const [x, y] = nearest;
    this.cross.style.display = "";
    this.cross.setAttribute("transform", `translate(${this._x(x)} 0)`);
    this.dot.setAttribute("cy", this._y(y));
    this.value.textContent = this._text(x, y, `step ${x}: `);
  }

  stepAt(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const share = (x - LEFT) / (WIDTH - LEFT - RIGHT);
    return this.first + Math.max(0, Math.min(1, share)) * (this.last - this.first);
  }

  _text(x, y, before) {
    const interval = this.interval.get(x);
    const ends = interval ? ` (${shown(interval[0])} to ${shown(interval[1])})` : "";
    return `${before}${shown(y)}${ends} ${y === 1 ? this.unit.replace(/s$/, "") : this.unit}`;
  }

  _x(x) {
    return LEFT + ((x - this.first) / (this.last - this.first)) * (WIDTH - LEFT - RIGHT);
  }

  _y(y) {
    const [low, high] = [this.ticks[0], this.ticks.at(-1)];
    return HEIGHT - BOTTOM - ((y - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  }

  _svg(curve) {
    const [begin, end] = [this.points[0], this.points.at(-1)];
    const said = `${curve.title}: ${shown(begin[1])} at step ${begin[0]}, ${shown(end[1])} at step ${end[0]}`;
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": said });
    for (const tick of this.ticks) {
      const y = this._y(tick);
      this.svg.append(
        draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }),
        draw("text", { class: "tick", x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, tickText(tick, this.ticks)));
    }
    for (const [step, anchor] of [[this.first, "start"], [this.last, "end"]]) {
      const place = { class: "tick", x: this._x(step), y: HEIGHT - 5, "text-anchor": anchor };
      this.svg.append(draw("text", place, String(step)));
    }
    this.svg.append(...this._lines());
    this.dot = draw("circle", { r: 3.5, class: "dot" });
    this.cross = draw("g", {});
    this.cross.append(draw("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM }), this.dot);
    this.svg.append(this.cross);
    return this.svg;
  }

  _lines() {
    const path = (points) => points.map(([x, y]) => `${this._x(x)},${this._y(y)}`).join(" ");
    if (this.interval.size || this.points.length === 1) return this._marks(path);
    if (this.points.length < SMOOTH_FROM) {
      return [draw("polyline", { class: "line", points: path(this.points) })];
    }
    return [
      draw("polyline", { class: "line raw", points: path(this.points) }),
      draw("polyline", { class: "line", points: path(movingAverage(this.points)) }),
    ];
  }

  /** Few points, such as evaluations: a line with points and their intervals. */
  _marks(path) {
    const bars = this.points.flatMap(([x, y]) => {
      const ends = this.interval.get(x);
      const place = { x1: this._x(x), x2: this._x(x) };
      const bar = ends && draw("line", { class: "interval", ...place, y1: this._y(ends[0]), y2: this._y(ends[1]) });
      return [bar, draw("circle", { class: "dot", r: 3, cx: this._x(x), cy: this._y(y) })].filter(Boolean);
    });
    return [draw("polyline", { class: "line", points: path(this.points) }), ...bars];
  }
}

const smoothingWindow = (points) => Math.max(3, Math.floor(points.length / 10));

function movingAverage(points) {
  const width = smoothingWindow(points);
  let sum = 0;
  return points.map(([x, y], at) => {
    sum += y - (at >= width ? points[at - width][1] : 0);
    return [x, sum / Math.min(at + 1, width)];
  });
}

/** Two to five round numbers at equal distances, between which both values are. */
function niceTicks(low, high) {
  if (low === high) return low === 0 ? [0, 1] : niceTicks(Math.min(0, low), Math.max(0, high));
  const span = high - low;
  const power = 10 ** Math.floor(Math.log10(span / 4));
  for (const factor of [1, 2, 5, 10, 20]) {
    const size = factor * power;
    const first = Math.floor(low / size + 1e-9);
    const last = Math.max(Math.ceil(high / size - 1e-9), first + 1);
    if (last - first > 4) continue;
    return Array.from({ length: last - first + 1 }, (_, at) => Number(((first + at) * size).toPrecision(12)));
  }
  return [low, high];
}

/** With as many decimals as the other ticks. */
function tickText(tick, ticks) {
  const size = ticks[1] - ticks[0];
  const largest = Math.max(...ticks.map(Math.abs));
  if (largest < 1e-3 || largest >= 1e5) return tick === 0 ? "0" : tick.toExponential().replaceAll("-", MINUS);
  return tick.toFixed(Math.max(0, -Math.floor(Math.log10(size) + 1e-9))).replace("-", MINUS);
}

/** Args: onStep: called with the step that one clicks at */
function showCurves(curves, onStep) {
  const drawable = curves.filter((curve) => curve.points.some(([, y]) => y !== null));
  if (!drawable.length) return;
  const steps = drawable.flatMap((curve) => curve.points.map(([x]) => x));
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const charts = drawable.map((curve) => new Chart(curve, first, last));
  for (const chart of charts) {
    const move = (event) => charts.forEach((one) => one.at(chart.stepAt(event)));
    chart.svg.addEventListener("pointermove", move);
    chart.svg.addEventListener("pointerdown", move);
    chart.svg.addEventListener("pointerleave", () => charts.forEach((one) => one.rest()));
    chart.svg.addEventListener("click", (event) => onStep(chart.stepAt(event)));
  }
  byId("curves").replaceChildren(...charts.map((chart) => chart.figure));
  const width = Math.max(...charts.map((chart) => smoothingWindow(chart.points)));
  const smooth = charts.some((chart) => chart.points.length >= SMOOTH_FROM);
  byId("curves-hint").textContent = "The x axis is the training step. Click a curve to see the rollouts of a step."
    + (smooth ? ` Thin lines: each step. Thick lines: mean of ${width} steps.` : "");
  byId("curves-section").hidden = false;
}
