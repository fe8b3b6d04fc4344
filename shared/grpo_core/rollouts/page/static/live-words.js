/* Words and tables of the live page. */

const UNKNOWN = "not known";

const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) : UNKNOWN);

function stepText({ step, steps }) {
  if (steps) return `step ${step} of ${steps}`;
  return step ? `step ${step}` : "no step yet";
}

/** Args: time: seconds since 1970 */
const clock = (time) => new Date(time * 1000).toTimeString().slice(0, 8);

function duration(seconds) {
  if (seconds < 10) return `${shown(seconds, 2)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const [hours, rest] = [Math.floor(minutes / 60), minutes % 60];
  return hours < 48 ? `${hours} h ${rest} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function bytes(size) {
  if (size < 2 ** 30) return `${Math.round(size / 2 ** 20)} MiB`;
  return `${shown(size / 2 ** 30)} GiB`;
}

/** A count in a short form, such as 1.2 M. */
function short(number) {
  for (const [size, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= size) return `${shown(number / size)} ${name}`;
  }
  return shown(number);
}

/** Tell it to people who hear the page. */
function announce(text) {
  byId("announcer").textContent = text;
}

/** Labels of radio buttons. Args: labels: by value */
const choices = (name, labels, chosen, onChoose) => Object.entries(labels).map(([value, textContent]) => {
  const input = make("input", { type: "radio", name, value, checked: value === chosen });
  input.addEventListener("change", () => onChoose(value));
  return make("label", {}, input, make("span", { textContent, dir: "auto" }));
});

/** Args:
 *   head: names of the columns, with # before those of numbers
 *   rows: elements
 */
function table(caption, head, rows) {
  return make("table", {},
    make("caption", { className: "only-said", textContent: caption }),
    make("thead", {}, make("tr", {}, ...head.map((name) =>
      make("th", { scope: "col", textContent: name.replace("#", ""), className: name.startsWith("#") ? "number" : "" })))),
    make("tbody", {}, ...rows));
}

/** Args: texts: the first one is the heading of the row */
function textRow([heading, ...texts]) {
  return make("tr", {},
    make("th", { scope: "row", textContent: heading, dir: "auto" }),
    ...texts.map((textContent) => make("td", { textContent, dir: "auto" })));
}
