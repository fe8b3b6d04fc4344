/* Filters: which groups are shown, and in which order. */

const SEARCH_DELAY_MS = 200;

class Filters {
  /** Args: onChange: called after every change */
  constructor(run, onChange) {
    this.run = run;
    this.onChange = onChange;
    this.steps = run.content.steps.map((one) => one.step);
    this._prepare();
  }

  get wanted() {
    return byId("search").value.toLowerCase();
  }

  get order() {
    return byId("order").value;
  }

  /** Groups that match, each with the matching sequences in `matching`, by their place. */
  async select(isCurrent) {
    const [from, to] = [numberIn("from", -Infinity), numberIn("to", Infinity)];
    const [low, high] = [numberIn("low", -Infinity), numberIn("high", Infinity)];
    const [task, wanted] = [byId("task").value, this.wanted];
    const found = [];
    for (const group of this.run.groups) {
      if (group.step < from || group.step > to || (task && group.task !== task)) continue;
      let matching = [...group.sequences.keys()].filter((place) => {
        const [score] = group.sequences[place];
        return score === null || (score >= low && score <= high);
      });
      if (wanted && matching.length) {
        const [prompt, ...completions] = await this.run.searchable(group);
        if (!isCurrent()) return null;
        if (!prompt.includes(wanted)) matching = matching.filter((place) => completions[place].includes(wanted));
      }
      if (matching.length) found.push({ ...group, matching: ordered(matching, group, this.order) });
    }
    return sorted(found, this.order);
  }

  showStep(step) {
    const nearest = this.steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
    this._setSteps(nearest, nearest);
    this.onChange();
  }

  _setSteps(from, to) {
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
    for (const id of ["from", "to"]) Object.assign(byId(id), { min: first, max: last });
    const tasks = [...new Set(this.run.groups.map((group) => group.task))].sort();
    const options = [["", "all tasks"], ...tasks.map((task) => [task, task])];
    byId("task").replaceChildren(...options.map(([value, textContent]) => make("option", { value, textContent })));
    byId("task-field").hidden = tasks.length < 2;
    this._setSteps(last, last);

    let waiting = 0;
    const later = () => {
      clearTimeout(waiting);
      waiting = setTimeout(this.onChange, SEARCH_DELAY_MS);
    };
    for (const id of ["search", "low", "high", "from", "to"]) byId(id).addEventListener("input", later);
    for (const id of ["task", "order"]) byId(id).addEventListener("input", this.onChange);
    for (const id of ["from", "to"]) byId(id).addEventListener("input", () => this._follow());
    byId("step").addEventListener("input", () => this.showStep(this.steps[Number(byId("step").value)]));
    byId("all-steps").addEventListener("click", () => {
      this._setSteps(first, last);
      this.onChange();
    });
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
  }
}

function numberIn(id, otherwise) {
  const { value } = byId(id);
  return value === "" ? otherwise : Number(value);
}

const SCORE = 0;
const ADVANTAGE = 1;
const size = (sequence) => Math.abs(sequence[ADVANTAGE] ?? 0);

/* Each order compares sequences; a group stands where its first sequence stands. */
const ORDERS = {
  worst: (left, right) => left[SCORE] - right[SCORE],
  best: (left, right) => right[SCORE] - left[SCORE],
  advantage: (left, right) => size(right) - size(left),
};

function ordered(places, group, order) {
  if (!(order in ORDERS)) return places;
  return places.sort((left, right) => ORDERS[order](group.sequences[left], group.sequences[right]));
}

function sorted(groups, order) {
  if (!(order in ORDERS)) return groups;
  const first = (group) => group.sequences[group.matching[0]];
  const whole = { worst: 1, best: -1 }[order] ?? 0;
  return groups.sort((left, right) =>
    ORDERS[order](first(left), first(right)) || whole * (meanScore(left) - meanScore(right)));
}

function meanScore(group) {
  return group.sequences.reduce((sum, sequence) => sum + sequence[SCORE], 0) / group.sequences.length;
}
