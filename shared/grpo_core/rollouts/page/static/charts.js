/* Curves: small SVG charts that share one crosshair. */

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 340;
const HEIGHT = 132;
const LEFT = 40;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const STYLES = 6; // of lines, see page.css
const KEY_STEPS = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };

const STEPS = { text: (x) => String(x), said: (x) => `step ${x}` };

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** A chart of one metric, with a line for each run. */
class Chart {
  /** Args: name, title, unit: of the metric */
  constructor({ name, title, unit }) {
    this.name = name;
    this.title = title;
    this.unit = unit;
    this.series = [];
    this.pointed = null; // x
    this.value = make("span", { className: "value" });
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "slider", tabindex: 0 });
    this.figure = make("figure", {},
      make("figcaption", {}, make("span", { className: "name", textContent: title, title: name }), this.value),
      this.svg);
  }

  /** Args:
   *   series: of each run its label, style (null if it is the only one), points [x, y, step] in order of x
   *     and intervals [x, low, high]
   *   axis: first and last x, and how an x reads on the axis (`text`) and in words (`said`)
   */
  show(series, axis) {
    this.series = series.map((one) => ({ ...one, ends: new Map(one.interval.map(([x, ...ends]) => [x, ends])) }));
    this.axis = { ...axis, last: axis.last > axis.first ? axis.last : axis.first + 1 };
    this.ticks = niceTicks(...rangeOf(this.series.flatMap((one) =>
      [...one.points.map(([, y]) => y), ...[...one.ends.values()].flat()])));
    this.svg.setAttribute("aria-label", `${this.title}: ${this.series.map((one) => this._summary(one)).join("; ")}`);
    this._draw();
    if (this.pointed === null) this.rest();
    else this.at(this.pointed);
  }

  rest() {
    this.pointed = null;
    this.cross.style.display = "none";
    this._tell(this.series.map((one) => one.points.at(-1)), "");
  }

  /** Show the values at the nearest points. */
  at(x) {
    this.pointed = x;
    const points = this.series.map((one) => this._pointAt(one, x));
    const [nearest] = points.filter(Boolean).sort((a, b) => Math.abs(a[0] - x) - Math.abs(b[0] - x));
    this.cross.style.display = "";
    this.cross.firstChild.setAttribute("transform", `translate(${this._x(nearest[0])} 0)`);
    for (const [at, point] of points.entries()) {
      const dot = this.cross.children[at + 1];
      dot.style.display = point ? "" : "none";
      if (point) dot.setAttribute("transform", `translate(${this._x(point[0])} ${this._y(point[1])})`);
    }
    this._tell(points, `${this.axis.said(nearest[0])}: `);
  }

  xAt(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const share = (x - LEFT) / (WIDTH - LEFT - RIGHT);
    return this.axis.first + Math.max(0, Math.min(1, share)) * (this.axis.last - this.axis.first);
  }

  /** The place of the line, and the step of its point, that are nearest to the pointer; and its x. */
  chosenAt(event) {
    const [x, box] = [this.xAt(event), this.svg.getBoundingClientRect()];
    const y = ((event.clientY - box.top) / box.height) * HEIGHT;
    const far = (at) => {
      const point = this._pointAt(this.series[at], x);
      return point ? Math.abs(this._y(point[1]) - y) : Infinity;
    };
    const [at] = [...this.series.keys()].sort((a, b) => far(a) - far(b));
    return { at, x, step: this._stepOf(at, x) };
  }

  /** The x that a key leads to, by the points of the first line; undefined if it is no such key. */
  xByKey(event) {
    if (!(event.key in KEY_STEPS)) return undefined;
    const [{ points }] = this.series;
    const place = this.pointed === null ? points.length - 1 : nearestPlace(points, this.pointed);
    return points[Math.max(0, Math.min(points.length - 1, place + KEY_STEPS[event.key]))][0];
  }

  stepByKey() {
    const x = this.pointed ?? this.axis.last;
    return { at: 0, x, step: this._stepOf(0, x) };
  }

  _stepOf(at, x) {
    const { points } = this.series[at];
    return points[nearestPlace(points, x)][2];
  }

  /** The nearest point, or null if the line ends far from x. */
  _pointAt({ points }, x) {
    const point = points[nearestPlace(points, x)];
    const reach = (this.axis.last - this.axis.first) / 20;
    const isBeyond = x < points[0][0] - reach || x > points.at(-1)[0] + reach;
    return this.series.length > 1 && isBeyond ? null : point;
  }

  _summary({ label, points }) {
    const [begin, end] = [points[0], points.at(-1)];
    const said = ([x, y]) => `${shown(y)} at ${this.axis.said(x)}`;
    return `${label ? `${label} ` : ""}${said(begin)}, ${said(end)}`;
  }

  _tell(points, before) {
    const texts = points.map((point, at) => this._text(this.series[at], point));
    if (this.series.length === 1) this.value.textContent = before + texts[0];
    else {
      this.value.replaceChildren(before, ...texts.map((text, at) => make("span", { className: "one" },
        lineSample(this.series[at].style), ` ${text}`)));
    }
    const [x, places] = [this.pointed ?? this.axis.last, { min: this.axis.first, max: this.axis.last }];
    const said = texts.map((text, at) => `${this.series[at].label ?? ""} ${text}`.trim()).join(", ");
    for (const [name, value] of Object.entries({ ...places, now: x, text: before + said })) {
      this.svg.setAttribute(`aria-value${name}`, value);
    }
  }

  _text(one, point) {
    if (!point) return "–";
    const [x, y] = point;
    const interval = one.ends.get(x);
    const ends = interval ? ` (${shown(interval[0])} to ${shown(interval[1])})` : "";
    return `${shown(y)}${ends} ${y === 1 ? this.unit.replace(/s$/, "") : this.unit}`;
  }

  _x(x) {
    return LEFT + ((x - this.axis.first) / (this.axis.last - this.axis.first)) * (WIDTH - LEFT - RIGHT);
  }

  _y(y) {
    const [low, high] = [this.ticks[0], this.ticks.at(-1)];
    return HEIGHT - BOTTOM - ((y - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  }

  _draw() {
    const parts = this.ticks.flatMap((tick) => {
      const y = this._y(tick);
      return [
        draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }),
        draw("text", { class: "tick", x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, tickText(tick, this.ticks)),
      ];
    });
    for (const [x, anchor] of [[this.axis.first, "start"], [this.axis.last, "end"]]) {
      const place = { class: "tick", x: this._x(x), y: HEIGHT - 5, "text-anchor": anchor };
      parts.push(draw("text", place, this.axis.text(x)));
    }
    this.cross = draw("g", {});
    this.cross.append(
      draw("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM }),
      ...this.series.map(({ style }) => draw("circle", { r: 3.5, class: `dot ${styleName(style)}` })));
    this.svg.replaceChildren(...parts, ...this.series.flatMap((one) => this._lines(one)), this.cross);
  }

  _lines({ points, ends, style }) {
    const path = (some) => some.map(([x, y]) => `${this._x(x).toFixed(1)},${this._y(y).toFixed(1)}`).join(" ");
    const line = (some, more = "") => draw("polyline", { class: `line ${styleName(style)} ${more}`, points: path(some) });
    if (ends.size || points.length === 1) return [line(points), ...this._marks(points, ends, style)];
    if (points.length < SMOOTH_FROM) return [line(points)];
    const smooth = line(movingAverage(points));
    return style === null ? [line(points, "raw"), smooth] : [smooth];
  }

  /** Of few points, such as evaluations: the points and their intervals. */
  _marks(points, ends, style) {
    return points.flatMap(([x, y]) => {
      const interval = ends.get(x);
      const beside = this._x(x) + 4 * (style ?? 0); // intervals of several runs at one step
      const place = { x1: beside, x2: beside };
      const bar = interval && draw("line", { class: `interval ${styleName(style)}`, ...place, y1: this._y(interval[0]), y2: this._y(interval[1]) });
      return [bar, draw("circle", { class: `dot ${styleName(style)}`, r: 3, cx: this._x(x), cy: this._y(y) })].filter(Boolean);
    });
  }
}

const styleName = (style) => (style === null ? "" : `style-${style % STYLES}`);

function lineSample(style) {
  const svg = draw("svg", { class: "sample", viewBox: "0 0 26 8", "aria-hidden": "true" });
  svg.append(draw("line", { class: `line ${styleName(style)}`, x1: 1, x2: 25, y1: 4, y2: 4 }));
  return svg;
}

/** Let all charts follow the pointer or the keys at one of them.
 *
 * Args: onChoose: called with the place of a line (`at`), x and step, if one clicks or presses Enter
 */
function connect(chart, charts, onChoose) {
  let wanted = null; // the x of the pointer, which may move more often than the screen is drawn
  const show = () => {
    if (wanted !== null) charts().forEach((one) => one.at(wanted));
    wanted = null;
  };
  const point = (x) => {
    if (wanted === null) requestAnimationFrame(show);
    wanted = x;
  };
  const rest = () => {
    wanted = null;
    charts().forEach((one) => one.rest());
  };
  const listen = (name, react) => chart.svg.addEventListener(name, react);
  for (const name of ["pointermove", "pointerdown"]) listen(name, (event) => point(chart.xAt(event)));
  for (const name of ["pointerleave", "blur"]) listen(name, rest);
  listen("click", (event) => onChoose(chart.chosenAt(event)));
  listen("keydown", (event) => {
    const x = chart.xByKey(event);
    if (event.key === "Enter") onChoose(chart.stepByKey());
    else if (x === undefined) return;
    else {
      wanted = x;
      show();
    }
    event.preventDefault();
    event.stopPropagation();
  });
}
